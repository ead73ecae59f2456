"""The replay: the statements of a pgbench run, logged by the server once, sent again by psql.

It is the workload that the predecessor of this library published: unlike pgbench, psql opens its connection
within the measurement, sends text, and prints what comes back.
"""

import hashlib
import re

from .transports import Failed, UNIX

STATEMENT = re.compile(r"^pgbench: LOG:  statement: (.*)$", re.MULTILINE)


class Replay:
    """A recorded run."""

    def __init__(self, postgres, database, seconds, path):
        """Records `pgbench -n -T seconds` on `database` of `postgres` in the file `path`."""
        logged = postgres.log.stat().st_size
        settings = {"PGOPTIONS": "-c log_statement=all"}
        postgres.pgbench(UNIX, database, seconds=seconds, settings=settings)
        with postgres.log.open() as log:
            log.seek(logged)
            statements = STATEMENT.findall(log.read())
        if "BEGIN;" not in statements:
            raise Failed(f"the server logged no transaction: {postgres.log}")
        # pgbench asks for the number of branches first.
        statements = statements[statements.index("BEGIN;") :]
        self.transactions = statements.count("END;")
        self.statements = len(statements)
        if self.statements != 7 * self.transactions:
            raise Failed(f"{self.statements} statements in {self.transactions} transactions of seven")
        self.path = path
        path.write_text("\n".join(statements) + "\n")

    def run(self, postgres, transport, database):
        """Replays; returns the finished psql, transactions per second, and a digest of the rows it printed."""
        output = self.path.with_suffix(f".{transport.name}")
        done = postgres.psql(transport, database, "-f", self.path, "-o", output)
        rows = output.read_bytes()
        # Only the one select of each transaction prints.
        if rows.count(b"\n") != self.transactions:
            raise Failed(f"the replay over {transport.title} printed {rows.count(10)} rows of {self.transactions}")
        return done, self.transactions / done.seconds, hashlib.sha256(rows).hexdigest()
