"""PostgreSQL, pgbench and psql."""

import re
import secrets
import signal
from pathlib import Path

from .servers import Server
from .transports import Failed, UNIX, call

SETTINGS = {
    # The transport is measured, not the disk: a commit waits for no write.
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "1h",
    # Nothing runs beside the measurement; the small tables are vacuumed before each.
    "autovacuum": "off",
    "shared_buffers": "256MB",
    "max_connections": "100",
}
"""Said in every report: they matter for TPC-B."""


class Postgres(Server):
    """A cluster of its own. Its clients authenticate with a password, so that no other user gets in."""

    name = account = "postgres"
    stop_signal = signal.SIGINT

    def __init__(self, folder, clients, library=None):
        super().__init__(folder, library)
        self.clients = clients
        self.binaries = binaries()
        self.password = secrets.token_hex(16)
        self.data = self.folder / "data"

    def prepare(self):
        password = self.folder / "password"
        password.touch(0o600)
        password.write_text(self.password)
        self.give(password)
        options = ["--auth=password", f"--pwfile={password}", "--username=bench", "--no-sync"]
        options += ["--locale=C", "--encoding=UTF8"]
        call([*self.as_account(), self.binaries / "initdb", *options, self.data], folder=self.folder)
        password.unlink()

    def program(self):
        settings = {
            **SETTINGS,
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            "log_line_prefix": "%a: ",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [self.binaries / "postgres", "-D", self.data, *options]

    def is_ready(self):
        try:
            self.query("postgres", "select 1")
            return True
        except Failed:
            return False

    def settings(self, transport, database):
        """Environment variables of libpq that lead to `database`."""
        return {
            "PGHOST": str(self.folder) if transport.unix else "127.0.0.1",
            # The caller's would lead elsewhere, or to TCP for a Unix socket.
            "PGHOSTADDR": "",
            "PGPORT": str(self.port),
            "PGUSER": "bench",
            "PGPASSWORD": self.password,
            "PGDATABASE": database,
            # What a Unix socket does not negotiate either.
            "PGSSLMODE": "disable",
            "PGGSSENCMODE": "disable",
        }

    def query(self, database, sql):
        """The result of `sql`, unaligned, over the Unix socket and without the library."""
        return self.psql(UNIX, database, "-c", sql).output.strip()

    def psql(self, transport, database, *options, timeout=300):
        """psql, with nothing in its output but rows; stops at the first error."""
        command = [self.binaries / "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *options]
        return self.clients.run(transport, command, self.settings(transport, database), timeout)

    def make_databases(self, names, scale):
        """One database with pgbench's tables for each name, all with equal rows."""
        first, *others = names
        self.query("postgres", f"create database {first}")
        command = [self.binaries / "pgbench", "-i", "-q", "-s", scale]
        self.clients.run(UNIX, command, self.settings(UNIX, first))
        for name in others:
            self.query("postgres", f"create database {name} template {first}")

    def pgbench(self, transport, database, *options, seconds, settings=None):
        """pgbench for `seconds`; returns its result, transactions per second, and their number."""
        # It would empty pgbench_history, which the balances are checked against.
        for table in ("pgbench_branches", "pgbench_tellers"):
            self.query(database, f"vacuum {table}")
        command = [self.binaries / "pgbench", "-n", "-T", seconds, *options]
        settings = {**self.settings(transport, database), **(settings or {})}
        done = self.clients.run(transport, command, settings, timeout=seconds + 60)
        # With -C the one that includes the time of connecting, which is the only one then.
        tps = re.search(r"^tps = ([0-9.]+)", done.output, re.MULTILINE)
        count = re.search(r"^number of transactions actually processed: (\d+)", done.output, re.MULTILINE)
        failed = re.search(r"^number of failed transactions: ([1-9]\d*)", done.output, re.MULTILINE)
        if not tps or not count or failed:
            raise Failed(f"pgbench over {transport.title}: {done.output}")
        return done, float(tps[1]), int(count[1])


def binaries():
    """The folder of the newest server's programs. Those in /usr/bin are Perl scripts on Debian."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if not folders:
        raise Failed("no PostgreSQL server in /usr/lib/postgresql")
    return max(folders, key=lambda folder: int(folder.parent.name))
