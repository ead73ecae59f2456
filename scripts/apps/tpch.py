"""TPC-H: its tables, and its 22 queries with its validation parameters (TPC Benchmark H, revision 3.0.1, section 2.4), in DataFusion's SQL.

Q15's view is a common table expression. Queries that the specification limits to a number of rows have a LIMIT.
"""

import argparse
import subprocess
from pathlib import Path

from . import script
from .series import tell
from .transports import Failed

REVENUE = "l_extendedprice * (1 - l_discount)"

QUERIES = {
    1: f"""
SELECT l_returnflag, l_linestatus, sum(l_quantity), sum(l_extendedprice), sum({REVENUE}), sum({REVENUE} * (1 + l_tax)),
    avg(l_quantity), avg(l_extendedprice), avg(l_discount), count(*)
FROM lineitem WHERE l_shipdate <= DATE '1998-09-02'
GROUP BY l_returnflag, l_linestatus ORDER BY l_returnflag, l_linestatus""",
    2: """
SELECT s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
FROM part JOIN partsupp ON ps_partkey = p_partkey JOIN supplier ON s_suppkey = ps_suppkey
    JOIN nation ON n_nationkey = s_nationkey JOIN region ON r_regionkey = n_regionkey
WHERE p_size = 15 AND p_type LIKE '%BRASS' AND r_name = 'EUROPE' AND ps_supplycost = (
    SELECT min(ps_supplycost) FROM partsupp JOIN supplier ON s_suppkey = ps_suppkey
        JOIN nation ON n_nationkey = s_nationkey JOIN region ON r_regionkey = n_regionkey
    WHERE ps_partkey = p_partkey AND r_name = 'EUROPE')
ORDER BY s_acctbal DESC, n_name, s_name, p_partkey LIMIT 100""",
    3: f"""
SELECT l_orderkey, sum({REVENUE}) AS revenue, o_orderdate, o_shippriority
FROM customer JOIN orders ON o_custkey = c_custkey JOIN lineitem ON l_orderkey = o_orderkey
WHERE c_mktsegment = 'BUILDING' AND o_orderdate < DATE '1995-03-15' AND l_shipdate > DATE '1995-03-15'
GROUP BY l_orderkey, o_orderdate, o_shippriority ORDER BY revenue DESC, o_orderdate, l_orderkey LIMIT 10""",
    4: """
SELECT o_orderpriority, count(*) FROM orders
WHERE o_orderdate >= DATE '1993-07-01' AND o_orderdate < DATE '1993-10-01'
    AND EXISTS (SELECT 1 FROM lineitem WHERE l_orderkey = o_orderkey AND l_commitdate < l_receiptdate)
GROUP BY o_orderpriority ORDER BY o_orderpriority""",
    5: f"""
SELECT n_name, sum({REVENUE}) AS revenue
FROM customer JOIN orders ON o_custkey = c_custkey JOIN lineitem ON l_orderkey = o_orderkey
    JOIN supplier ON s_suppkey = l_suppkey AND s_nationkey = c_nationkey
    JOIN nation ON n_nationkey = s_nationkey JOIN region ON r_regionkey = n_regionkey
WHERE r_name = 'ASIA' AND o_orderdate >= DATE '1994-01-01' AND o_orderdate < DATE '1995-01-01'
GROUP BY n_name ORDER BY revenue DESC""",
    6: """
SELECT sum(l_extendedprice * l_discount) FROM lineitem
WHERE l_shipdate >= DATE '1994-01-01' AND l_shipdate < DATE '1995-01-01'
    AND l_discount BETWEEN 0.05 AND 0.07 AND l_quantity < 24""",
    7: f"""
SELECT supplying, consuming, year, sum(volume) FROM (
    SELECT s.n_name AS supplying, c.n_name AS consuming, extract(year FROM l_shipdate) AS year, {REVENUE} AS volume
    FROM supplier JOIN lineitem ON l_suppkey = s_suppkey JOIN orders ON o_orderkey = l_orderkey
        JOIN customer ON c_custkey = o_custkey
        JOIN nation s ON s.n_nationkey = s_nationkey JOIN nation c ON c.n_nationkey = c_nationkey
    WHERE (s.n_name = 'FRANCE' AND c.n_name = 'GERMANY' OR s.n_name = 'GERMANY' AND c.n_name = 'FRANCE')
        AND l_shipdate BETWEEN DATE '1995-01-01' AND DATE '1996-12-31')
GROUP BY supplying, consuming, year ORDER BY supplying, consuming, year""",
    8: f"""
SELECT year, sum(CASE WHEN nation = 'BRAZIL' THEN volume ELSE 0 END) / sum(volume) FROM (
    SELECT extract(year FROM o_orderdate) AS year, {REVENUE} AS volume, s.n_name AS nation
    FROM part JOIN lineitem ON l_partkey = p_partkey JOIN supplier ON s_suppkey = l_suppkey
        JOIN orders ON o_orderkey = l_orderkey JOIN customer ON c_custkey = o_custkey
        JOIN nation c ON c.n_nationkey = c_nationkey JOIN region ON r_regionkey = c.n_regionkey
        JOIN nation s ON s.n_nationkey = s_nationkey
    WHERE r_name = 'AMERICA' AND p_type = 'ECONOMY ANODIZED STEEL'
        AND o_orderdate BETWEEN DATE '1995-01-01' AND DATE '1996-12-31')
GROUP BY year ORDER BY year""",
    9: f"""
SELECT nation, year, sum(amount) FROM (
    SELECT n_name AS nation, extract(year FROM o_orderdate) AS year,
        {REVENUE} - ps_supplycost * l_quantity AS amount
    FROM part JOIN lineitem ON l_partkey = p_partkey JOIN supplier ON s_suppkey = l_suppkey
        JOIN partsupp ON ps_partkey = l_partkey AND ps_suppkey = l_suppkey
        JOIN orders ON o_orderkey = l_orderkey JOIN nation ON n_nationkey = s_nationkey
    WHERE p_name LIKE '%green%')
GROUP BY nation, year ORDER BY nation, year DESC""",
    10: f"""
SELECT c_custkey, c_name, sum({REVENUE}) AS revenue, c_acctbal, n_name, c_address, c_phone, c_comment
FROM customer JOIN orders ON o_custkey = c_custkey JOIN lineitem ON l_orderkey = o_orderkey
    JOIN nation ON n_nationkey = c_nationkey
WHERE o_orderdate >= DATE '1993-10-01' AND o_orderdate < DATE '1994-01-01' AND l_returnflag = 'R'
GROUP BY c_custkey, c_name, c_acctbal, c_phone, n_name, c_address, c_comment ORDER BY revenue DESC, c_custkey LIMIT 20""",
    11: """
WITH stock AS (
    SELECT ps_partkey, ps_supplycost * ps_availqty AS value
    FROM partsupp JOIN supplier ON s_suppkey = ps_suppkey JOIN nation ON n_nationkey = s_nationkey
    WHERE n_name = 'GERMANY')
SELECT ps_partkey, sum(value) AS total FROM stock GROUP BY ps_partkey
HAVING sum(value) > (SELECT sum(value) * 0.0001 / {scale} FROM stock) ORDER BY total DESC""",
    12: """
SELECT l_shipmode, sum(CASE WHEN o_orderpriority IN ('1-URGENT', '2-HIGH') THEN 1 ELSE 0 END),
    sum(CASE WHEN o_orderpriority IN ('1-URGENT', '2-HIGH') THEN 0 ELSE 1 END)
FROM orders JOIN lineitem ON l_orderkey = o_orderkey
WHERE l_shipmode IN ('MAIL', 'SHIP') AND l_commitdate < l_receiptdate AND l_shipdate < l_commitdate
    AND l_receiptdate >= DATE '1994-01-01' AND l_receiptdate < DATE '1995-01-01'
GROUP BY l_shipmode ORDER BY l_shipmode""",
    13: """
SELECT orders_of_one, count(*) AS customers FROM (
    SELECT c_custkey, count(o_orderkey) AS orders_of_one
    FROM customer LEFT JOIN orders ON o_custkey = c_custkey AND o_comment NOT LIKE '%special%requests%'
    GROUP BY c_custkey)
GROUP BY orders_of_one ORDER BY customers DESC, orders_of_one DESC""",
    14: f"""
SELECT 100.00 * sum(CASE WHEN p_type LIKE 'PROMO%' THEN {REVENUE} ELSE 0 END) / sum({REVENUE})
FROM lineitem JOIN part ON p_partkey = l_partkey
WHERE l_shipdate >= DATE '1995-09-01' AND l_shipdate < DATE '1995-10-01'""",
    15: f"""
WITH revenue AS (
    SELECT l_suppkey, sum({REVENUE}) AS total FROM lineitem
    WHERE l_shipdate >= DATE '1996-01-01' AND l_shipdate < DATE '1996-04-01' GROUP BY l_suppkey)
SELECT s_suppkey, s_name, s_address, s_phone, total FROM supplier JOIN revenue ON l_suppkey = s_suppkey
WHERE total = (SELECT max(total) FROM revenue) ORDER BY s_suppkey""",
    16: """
SELECT p_brand, p_type, p_size, count(DISTINCT ps_suppkey) AS suppliers FROM partsupp JOIN part ON p_partkey = ps_partkey
WHERE p_brand <> 'Brand#45' AND p_type NOT LIKE 'MEDIUM POLISHED%' AND p_size IN (49, 14, 23, 45, 19, 3, 36, 9)
    AND ps_suppkey NOT IN (SELECT s_suppkey FROM supplier WHERE s_comment LIKE '%Customer%Complaints%')
GROUP BY p_brand, p_type, p_size ORDER BY suppliers DESC, p_brand, p_type, p_size""",
    17: """
SELECT sum(l_extendedprice) / 7.0 FROM lineitem JOIN part ON p_partkey = l_partkey
WHERE p_brand = 'Brand#23' AND p_container = 'MED BOX'
    AND l_quantity < (SELECT 0.2 * avg(l_quantity) FROM lineitem WHERE l_partkey = p_partkey)""",
    18: """
SELECT c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity)
FROM customer JOIN orders ON o_custkey = c_custkey JOIN lineitem ON l_orderkey = o_orderkey
WHERE o_orderkey IN (SELECT l_orderkey FROM lineitem GROUP BY l_orderkey HAVING sum(l_quantity) > 300)
GROUP BY c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice
ORDER BY o_totalprice DESC, o_orderdate, o_orderkey LIMIT 100""",
    19: f"""
SELECT sum({REVENUE}) FROM lineitem JOIN part ON p_partkey = l_partkey
WHERE l_shipmode IN ('AIR', 'AIR REG') AND l_shipinstruct = 'DELIVER IN PERSON' AND (
    p_brand = 'Brand#12' AND p_container IN ('SM CASE', 'SM BOX', 'SM PACK', 'SM PKG')
        AND l_quantity BETWEEN 1 AND 11 AND p_size BETWEEN 1 AND 5
    OR p_brand = 'Brand#23' AND p_container IN ('MED BAG', 'MED BOX', 'MED PKG', 'MED PACK')
        AND l_quantity BETWEEN 10 AND 20 AND p_size BETWEEN 1 AND 10
    OR p_brand = 'Brand#34' AND p_container IN ('LG CASE', 'LG BOX', 'LG PACK', 'LG PKG')
        AND l_quantity BETWEEN 20 AND 30 AND p_size BETWEEN 1 AND 15)""",
    20: """
SELECT s_name, s_address FROM supplier JOIN nation ON n_nationkey = s_nationkey
WHERE n_name = 'CANADA' AND s_suppkey IN (
    SELECT ps_suppkey FROM partsupp
    WHERE ps_partkey IN (SELECT p_partkey FROM part WHERE p_name LIKE 'forest%') AND ps_availqty > (
        SELECT 0.5 * sum(l_quantity) FROM lineitem
        WHERE l_partkey = ps_partkey AND l_suppkey = ps_suppkey
            AND l_shipdate >= DATE '1994-01-01' AND l_shipdate < DATE '1995-01-01'))
ORDER BY s_name""",
    21: """
SELECT s_name, count(*) AS waiting FROM supplier JOIN lineitem late ON late.l_suppkey = s_suppkey
    JOIN orders ON o_orderkey = late.l_orderkey JOIN nation ON n_nationkey = s_nationkey
WHERE o_orderstatus = 'F' AND late.l_receiptdate > late.l_commitdate AND n_name = 'SAUDI ARABIA'
    AND EXISTS (SELECT 1 FROM lineitem l
        WHERE l.l_orderkey = late.l_orderkey AND l.l_suppkey <> late.l_suppkey)
    AND NOT EXISTS (SELECT 1 FROM lineitem l
        WHERE l.l_orderkey = late.l_orderkey AND l.l_suppkey <> late.l_suppkey AND l.l_receiptdate > l.l_commitdate)
GROUP BY s_name ORDER BY waiting DESC, s_name LIMIT 100""",
    22: """
SELECT code, count(*), sum(c_acctbal) FROM (
    SELECT substr(c_phone, 1, 2) AS code, c_acctbal FROM customer
    WHERE substr(c_phone, 1, 2) IN ('13', '31', '23', '29', '30', '18', '17')
        AND c_acctbal > (SELECT avg(c_acctbal) FROM customer
            WHERE c_acctbal > 0.00 AND substr(c_phone, 1, 2) IN ('13', '31', '23', '29', '30', '18', '17'))
        AND NOT EXISTS (SELECT 1 FROM orders WHERE o_custkey = c_custkey))
GROUP BY code ORDER BY code""",
}


def add_arguments(parser):
    parser.add_argument("--tpchgen", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=script.above_zero, default=1, help="scale factor of TPC-H (default 1)")


def generate(arguments, folder):
    """All tables, as Parquet."""
    tell(f"\n== generate TPC-H at scale factor {arguments.scale:g}")
    command = [arguments.tpchgen, "parquet", "-s", str(arguments.scale), "--output-dir", folder]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"tpchgen-cli: {done.stderr.strip()}")


def query(number, scale):
    """The text of one, for tables of that scale factor, on which Q11 depends."""
    return QUERIES[number].strip().replace("{scale}", f"{scale:g}")
