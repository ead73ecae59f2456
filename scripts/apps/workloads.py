"""The servers of a run, and the workloads on them."""

from contextlib import ExitStack, nullcontext

from .memcached import Memcached
from .nginx import LARGE, Nginx, SMALL
from .postgres import Postgres
from .redis import Redis
from .replay import Replay
from .series import Sample, Workload, tell
from .transports import Clients, EACH, Failed, Library, TCP_ONLY

PROBE = 4000
"""Requests by which redis-benchmark, which knows no duration, finds out how many fill the time."""

PROBE_EACH = 100
"""Of these on each connection at least: shorter ones would teach the server that connections to its port are short."""


class Servers:
    """PostgreSQL and Redis, each without the library and with it; if `more`, nginx and memcached, too. Use in a `with`."""

    def __init__(self, folder, library, more=False):
        library = Library(library, folder)
        self.clients = Clients(library, folder)
        self.postgres_of = {with_it: Postgres(folder, self.clients, with_it) for with_it in (None, library)}
        self.redis_of = {with_it: Redis(folder, self.clients, with_it) for with_it in (None, library)}
        kinds = (Nginx, Memcached) if more else ()
        self.more = {kind: {with_it: kind(folder, self.clients, with_it) for with_it in (None, library)} for kind in kinds}
        self.library = library
        self.transactions = {}

    def __enter__(self):
        with ExitStack() as starting:
            for servers in (self.postgres_of, self.redis_of, *self.more.values()):
                for server in servers.values():
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
        all_kinds = (self.postgres_of, self.redis_of, *self.more.values())
        return [servers[self.library] for servers in all_kinds]

    def of(self, kind, transport):
        return self.more[kind][self.library if transport.server else None]

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

    def wrk(self, name, size, clients, seconds):
        """Requests per second of wrk for a file of `size` bytes, which is the same from both servers."""

        def measure(transport, _):
            nginx = self.of(Nginx, transport)
            if len({self.of(Nginx, each).fetch(size) for each in TCP_ONLY}) != 1:
                raise Failed(f"two nginx serve other files of {size} bytes")
            before = nginx.cpu_seconds()
            done, rate, count = nginx.wrk(transport, size, clients, seconds)
            cpu = done.cpu_seconds + nginx.cpu_seconds() - before
            return Sample(rate, done.counts, clients, cpu, count)

        return Workload(name, "requests/s", measure, TCP_ONLY)

    def slap(self, name, clients, seconds):
        """Requests per second of memcaslap."""

        def measure(transport, _):
            memcached = self.of(Memcached, transport)
            before = memcached.cpu_seconds()
            done, rate, count = memcached.slap(transport, clients, seconds)
            cpu = done.cpu_seconds + memcached.cpu_seconds() - before
            return Sample(rate, done.counts, clients, cpu, count)

        return Workload(name, "requests/s", measure, TCP_ONLY)

    def redis_benchmark(
        self, name, transports, test, clients, seconds, keep_alive=True, one_core=False, pipeline=1
    ):
        """Requests per second of `redis-benchmark -t test -c clients`."""
        rates = {}

        def measure(transport, _):
            redis = self.redis(transport)
            with redis.on_one_core() if one_core else nullcontext():
                fewest = max(PROBE, PROBE_EACH * clients)
                if transport not in rates:
                    rates[transport] = redis.benchmark(transport, test, clients, fewest, keep_alive, pipeline)[1]
                requests = max(fewest, int(rates[transport] * seconds))
                before = redis.cpu_seconds()
                done, rate = redis.benchmark(transport, test, clients, requests, keep_alive, pipeline)
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
            # All databases have seen the same statements equally often.
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
