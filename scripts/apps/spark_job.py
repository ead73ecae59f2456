"""The driver of scripts/demo-spark: a Spark application that runs a job for each line that it reads.

Arguments: the master's URL, the folder with TPC-H's tables as Parquet, and settings, `name=value`. A line is the name of a job, or
`connections`; the answer is a line of JSON. It ends with its input.
"""

import hashlib
import json
import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

MAPPERS = 8
REDUCERS = 8

# As in the specification of TPC-H, with its validation values.
QUERIES = {
    "TPC-H 3": """
        SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue, o_orderdate, o_shippriority
        FROM customer JOIN orders ON c_custkey = o_custkey JOIN lineitem ON l_orderkey = o_orderkey
        WHERE c_mktsegment = 'BUILDING' AND o_orderdate < DATE '1995-03-15' AND l_shipdate > DATE '1995-03-15'
        GROUP BY l_orderkey, o_orderdate, o_shippriority ORDER BY revenue DESC, o_orderdate, l_orderkey LIMIT 10""",
    "TPC-H 9": """
        SELECT nation, o_year, sum(amount) AS sum_profit FROM (
            SELECT n_name AS nation, year(o_orderdate) AS o_year,
                l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity AS amount
            FROM part JOIN lineitem ON p_partkey = l_partkey
                JOIN supplier ON s_suppkey = l_suppkey
                JOIN partsupp ON ps_suppkey = l_suppkey AND ps_partkey = l_partkey
                JOIN orders ON o_orderkey = l_orderkey JOIN nation ON s_nationkey = n_nationkey
            WHERE p_name LIKE '%green%')
        GROUP BY nation, o_year ORDER BY nation, o_year DESC""",
}


def group_by(spark, pairs, size):
    """Spark's GroupByTest: `pairs` values of `size` bytes, all of which are shuffled before they are grouped."""
    value = f.substring(f.repeat(f.hex(f.xxhash64("id")), size // 16 + 1), 1, size)
    rows = spark.range(0, pairs, 1, MAPPERS).select((f.xxhash64("id") % 10_000).alias("key"), value.alias("value"))
    groups = rows.repartition(REDUCERS, "key").groupBy("key")
    # Every byte counts in the result.
    sums = groups.agg(f.count("*").alias("count"), f.sum(f.crc32("value")).alias("sum"))
    return sums.agg(f.count("*"), f.sum("count"), f.sum("sum"), f.sum(f.xxhash64("key", "count", "sum") % 1_000_003))


def main():
    master, tables, *settings = sys.argv[1:]
    builder = SparkSession.builder.master(master).appName("thallus demo")
    for setting in settings:
        name, _, value = setting.partition("=")
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for table in ("customer", "orders", "lineitem", "part", "supplier", "partsupp", "nation"):
        spark.read.parquet(f"{tables}/{table}.parquet").createOrReplaceTempView(table)
    print(json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        name, *numbers = line.strip().split(",")
        if name == "connections":
            # Of executors and the driver: where blocks are served.
            places = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keys().mkString(",")
            print(json.dumps({"managers": sorted(places.split(","))}), flush=True)
            continue
        frame = spark.sql(QUERIES[name]) if name in QUERIES else group_by(spark, *map(int, numbers))
        spark.sparkContext.setJobGroup(str(number), name)
        begin = time.perf_counter()
        rows = frame.collect()
        seconds = time.perf_counter() - begin
        digest = hashlib.sha256(repr([tuple(row) for row in rows]).encode()).hexdigest()
        print(json.dumps({"group": str(number), "seconds": seconds, "rows": len(rows), "digest": digest}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
