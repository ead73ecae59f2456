"""The servers of a run, and the workloads on them."""

from contextlib import ExitStack, nullcontext

from .postgres import Postgres
from .redis import Redis
from .replay import Replay
from .series import Sample, Workload, tell
from .transports import Clients, EACH, Failed, Library

PROBE = 4000
"""Requests by which redis-benchmark, which knows no duration, finds out how many fill the time."""


class Servers:
    """PostgreSQL and Redis, each without the library and with it. Use in a `with`."""

    def __init__(self, folder, library):
        library = Library(library, folder)
        self.clients = Clients(library, folder)
        self.postgres_of = {with_it: Postgres(folder, self.clients, with_it) for with_it in (None, library)}
        self.redis_of = {with_it: Redis(folder, self.clients, with_it) for with_it in (None, library)}
        self.library = library
        self.transactions = {}

    def __enter__(self):
        with ExitStack() as starting:
            for server in (*self.postgres_of.values(), *self.redis_of.values()):
                starting.enter_context(server)
            self.running = starting.pop_all()
        return self

    def __exit__(self, *failure):
        return self.running.__exit__(*failure)

    def postgres(self, transport):
        return self.postgres_of[self.library if transport.server else None]

    def redis(self, transport):
        return self.redis_of[self.library if transport.server else None]

    def preloaded(self):
        """The servers that have the library."""
        return self.postgres_of[self.library], self.redis_of[self.library]

    def make_databases(self, transports, scale):
        """For each transport one database for timed runs and one for the replay, all with equal rows."""
        for with_it, postgres in self.postgres_of.items():
            own = [transport for transport in transports if transport.server == bool(with_it)]
            names = [name for transport in own for name in (timed(transport), replayed(transport))]
            postgres.make_databases(names, scale)

    def pgbench(self, name, transports, *options, clients, seconds, short=False, one_core=False):
        """Transactions per second of `pgbench OPTIONS -c clients`."""

        def measure(transport, _):
            postgres, database = self.postgres(transport), timed(transport)
            before = postgres.cpu_seconds()
            with postgres.on_one_core() if one_core else nullcontext():
                done, tps, count = postgres.pgbench(transport, database, "-c", clients, *options, seconds=seconds)
            cpu = done.cpu_seconds + postgres.cpu_seconds() - before
            if "-S" not in options:
                self.transactions[transport] = self.transactions.get(transport, 0) + count
            return Sample(tps, done.counts, clients, cpu, count)

        return Workload(name, "transactions/s", measure, transports, short)

    def redis_benchmark(self, name, transports, test, clients, seconds, keep_alive=True, one_core=False):
        """Requests per second of `redis-benchmark -t test -c clients`."""
        rates = {}

        def measure(transport, _):
            redis = self.redis(transport)
            with redis.on_one_core() if one_core else nullcontext():
                if transport not in rates:
                    rates[transport] = redis.benchmark(transport, test, clients, PROBE, keep_alive)[1]
                requests = max(PROBE, int(rates[transport] * seconds))
                before = redis.cpu_seconds()
                done, rate = redis.benchmark(transport, test, clients, requests, keep_alive)
            cpu = done.cpu_seconds + redis.cpu_seconds() - before
            rates[transport] = rate
            return Sample(rate, done.counts, clients, cpu, requests)

        return Workload(name, "requests/s", measure, transports, short=not keep_alive)

    def replay(self, name, seconds, folder):
        """Transactions per second of the replay through psql, connection set-up included."""
        first = EACH[0]
        # Recorded on a database of timed runs: those of the replay start equal.
        recorded = Replay(self.postgres(first), timed(first), seconds, folder / "replay.sql")
        self.transactions[first] = self.transactions.get(first, 0) + recorded.transactions
        tell(f"recorded {recorded.transactions} transactions, {recorded.statements} statements")
        digests = set()

        def measure(transport, number):
            postgres = self.postgres(transport)
            before = postgres.cpu_seconds()
            done, tps, digest = recorded.run(postgres, transport, replayed(transport))
            cpu = done.cpu_seconds + postgres.cpu_seconds() - before
            # All three databases have seen the same statements equally often.
            digests.add((number, digest))
            if len(digests) > number + 1:
                raise Failed(f"the replay over {transport.title} printed other rows than before")
            return Sample(tps, done.counts, 1, cpu, recorded.transactions)

        return Workload(name, "transactions/s", measure, EACH)


def timed(transport):
    """The database of a transport's timed runs."""
    return f"timed_{transport.name.replace('-', '_')}"


def replayed(transport):
    """The database that a transport's replays change."""
    return f"replayed_{transport.name.replace('-', '_')}"
