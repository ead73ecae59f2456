"""What must be equal over every transport. Raises Failed where it is not."""

import hashlib
import random
import string

from .transports import Counts, Failed

BALANCES = """
select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers),
       (select sum(bbalance) from pgbench_branches), (select coalesce(sum(delta), 0) from pgbench_history),
       (select count(*) from pgbench_history)
"""

TABLES = """
copy (select * from pgbench_accounts order by aid) to stdout;
copy (select tid, bid, aid, delta from pgbench_history order by 1, 2, 3, 4) to stdout;
copy (select * from pgbench_tellers order by tid) to stdout;
copy (select * from pgbench_branches order by bid) to stdout;
"""

WARM_UP = 64
"""Small statements before the large ones: only a connection in use finds out about its peer."""

KEYS = 1000


def balances(postgres, transport, database, transactions):
    """Every transaction adds the same amount to three tables and notes it in the fourth: TPC-B's own check."""
    accounts, tellers, branches, history, rows = (
        int(value) for value in postgres.query(database, BALANCES).split("|")
    )
    if not accounts == tellers == branches == history:
        sums = f"accounts {accounts}, tellers {tellers}, branches {branches}, history {history}"
        raise Failed(f"balances differ after TPC-B over {transport.title}: {sums}")
    if rows != transactions:
        raise Failed(f"pgbench over {transport.title} counted {transactions} transactions, the table has {rows}")


def rows(databases, folder):
    """Every row of the four tables, read over each transport, has the same bytes.

    `databases`: transport → (postgres, database). Returns the number of rows, and transport → its counts.
    """
    script = folder / "rows.sql"
    script.write_text("select 1;\n" * WARM_UP + TABLES)
    seen = {}
    for transport, (postgres, database) in databases.items():
        done = postgres.psql(transport, database, "-f", script)
        lines = done.output.splitlines()[WARM_UP:]
        seen[transport] = done.counts, len(lines), digest(lines)
    return same(seen, "the rows of pgbench's tables")


def keys(servers):
    """Keys written and read over each transport have the values that were written.

    `servers`: transport → redis. Returns the number of keys, and transport → its counts.
    """
    random.seed(KEYS)
    values = ["".join(random.choices(string.ascii_letters, k=random.randrange(1, 8192))) for _ in range(KEYS)]
    sets = "".join(f"SET key:{number} {value}\n" for number, value in enumerate(values))
    gets = "".join(f"GET key:{number}\n" for number in range(KEYS))
    seen = {}
    for database, (transport, redis) in enumerate(servers.items()):
        counts = Counts()
        for commands, expected in ((sets, ["OK"] * KEYS), (gets, values)):
            done = redis.cli(transport, commands, database)
            counts += done.counts
            lines = done.output.splitlines()
            if lines != expected:
                raise Failed(f"Redis over {transport.title} answers something else than was written")
        seen[transport] = counts, len(lines), digest(lines)
    return same(seen, "the values of Redis")


def digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def same(seen, what):
    """`seen`: transport → (counts, length, digest); the length that all have, and transport → counts."""
    if len({result[1:] for result in seen.values()}) != 1:
        listed = ", ".join(f"{transport.title}: {result[1:]}" for transport, result in seen.items())
        raise Failed(f"{what} differ: {listed}")
    lengths = {length for _, length, _ in seen.values()}
    return lengths.pop(), {transport: counts for transport, (counts, _, _) in seen.items()}
