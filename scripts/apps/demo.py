"""scripts/demo: unmodified PostgreSQL and Redis over TCP, a Unix socket and Thallus (in place of each), in turn."""

import platform
import sys

from . import checks, script
from .postgres import SETTINGS
from .series import markdown, tell
from .transports import EACH, Failed, TCP, THALLUS, THALLUS_UNIX, UNIX
from .workloads import Servers, replayed, timed

SCALE = 5


def parse():
    parser = script.parser("demo", __doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes after the build")
    return parser.parse_args()


def demonstrate(arguments, folder):
    rounds, seconds, recorded = (3, 1, 2) if arguments.quick else (5, 3, 5)
    servers = Servers(folder, arguments.release / "libthallus_shim.so")
    tell("\n== start private servers: PostgreSQL and Redis, each without the library and with it")
    with servers:
        servers.make_databases(EACH, SCALE)
        tell(f"\n== measure: {rounds} rounds, TCP, Unix socket, Thallus and Thallus over a Unix socket in turn")
        workloads = [
            servers.pgbench("pgbench, select only", EACH, "-S", "-M", "prepared", clients=1, seconds=seconds),
            servers.pgbench("pgbench, TPC-B", EACH, clients=1, seconds=seconds),
            servers.replay("replay through psql", recorded, folder),
        ]
        for clients in (1, 50):
            for test in ("SET", "GET"):
                name = f"Redis {test}, {clients} connection{'s' if clients > 1 else ''}"
                workloads.append(servers.redis_benchmark(name, EACH, test, clients, seconds))
        for number, workload in enumerate(workloads):
            workload.run(rounds, f"[{number + 1}/{len(workloads)}] ")
        tell("\n== check that the results are equal")
        checked = check(servers, folder)
    report(workloads, checked, servers, rounds, seconds)
    for transport, kernel in ((THALLUS, TCP), (THALLUS_UNIX, UNIX)):
        stayed = [workload.name for workload in workloads if not workload.was_upgraded(transport)]
        stayed += [name for name, _, counts in checked if not counts[transport].upgraded]
        if stayed:
            raise Failed(f"stayed on the kernel's {kernel.title}: {', '.join(stayed)}")
    return 0


def check(servers, folder):
    """What was compared, how much of it, and how it travelled."""
    for transport in EACH:
        count = servers.transactions[transport]
        checks.balances(servers.postgres(transport), transport, timed(transport), count)
        tell(f"{transport.title}: the balances of {count:,} transactions add up")
    databases = {transport: (servers.postgres(transport), replayed(transport)) for transport in EACH}
    rows, row_counts = checks.rows(databases, folder)
    tell(f"all: {rows:,} rows of the replayed tables are the same")
    keys, key_counts = checks.keys({transport: servers.redis(transport) for transport in EACH})
    tell(f"all: {keys:,} keys of Redis have the values that were written")
    return [("rows compared", rows, row_counts), ("keys compared", keys, key_counts)]


def report(workloads, checked, servers, rounds, seconds):
    rows = []
    for workload in workloads:
        values = [workload.spread(transport) for transport in EACH]
        ratios = [workload.show_ratio(transport) for transport in (THALLUS, THALLUS_UNIX)]
        paths = "; ".join(workload.counts(transport).describe() for transport in (THALLUS, THALLUS_UNIX))
        rows.append([workload.name, workload.unit, *values, *ratios, paths])
    for name, count, counts in checked:
        paths = "; ".join(counts[transport].describe() for transport in (THALLUS, THALLUS_UNIX))
        rows.append([name, "equal", *[f"{count:,}"] * len(EACH), "", "", paths])
    titles = [transport.title for transport in EACH]
    head = ["", "", *titles, "Thallus ÷ TCP", "over Unix ÷ Unix", "connections (client side)"]
    print(f"\nMedian (lowest–highest) of {rounds} rounds of {seconds} s; both processes where the scheduler puts them.")
    print(f"{platform.machine()}, Linux {platform.release()}. pgbench scale {SCALE}, values of 64 bytes, no pipelining.")
    print("pgbench and redis-benchmark first open a short connection of their own.")
    print("PostgreSQL with " + ", ".join(f"{name}={value}" for name, value in SETTINGS.items()) + ".\n")
    print(markdown(head, rows, right=range(2, len(head) - 1)))
    for server in servers.preloaded():
        print(f"\n{server.name} itself: {server.counts().describe()}", end="")
    print()


if __name__ == "__main__":
    sys.exit(script.run("demo", demonstrate, parse()))
