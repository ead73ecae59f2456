"""scripts/demo-arrow: TPC-H tables from demo-server to demo-client, over TCP and with the library, in turn."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from . import script, tpch
from .series import tell
from .transports import Failed

QUERIES = {
    "lineitem, 16 columns": "FROM lineitem",
    "lineitem, 4 columns": "SELECT l_orderkey, l_partkey, l_quantity, l_extendedprice FROM lineitem",
    "lineitem, 1 column": "SELECT l_orderkey FROM lineitem",
    "orders, 9 columns": "FROM orders",
    "1,000 rows": "FROM lineitem LIMIT 1000",
    "1 row": "FROM lineitem LIMIT 1",
}
# (transport of the client, whether both ends have the library)
WAYS = [
    ("rpc", False),
    ("ipc", False),
    ("flight", False),
    ("scatter", False),
    ("rpc", True),
    ("flight", True),
    ("scatter", True),
    ("pull", True),
    ("auto", True),
]


def parse():
    parser = script.parser("demo-arrow", __doc__)
    tpch.add_arguments(parser)
    parser.add_argument("--rounds", type=script.at_least_one, default=5, help="measurements of each (default 5)")
    return parser.parse_args()


def demonstrate(arguments, folder):
    data = folder / "tpch"
    tpch.generate(arguments, data)
    with Ends(arguments.release, data, folder, False) as plain, Ends(arguments.release, data, folder, True) as preloaded:
        ends = {False: plain, True: preloaded}
        tell("\n== check that the results are equal")
        for name, sql in QUERIES.items():
            check(ends, name, sql)
        tell(f"\n== measure: {arguments.rounds} rounds, all ways in turn")
        results = {name: measure(ends, sql, arguments.rounds) for name, sql in QUERIES.items()}
    report(arguments, results)
    return 0


class Ends:
    """A server, and clients of it; with the library or without."""

    def __init__(self, release, data, folder, with_library):
        self.client = release / "demo-client"
        # It dies with this script, however that ends.
        listen = ["--listen", "127.0.0.1:0", "--flight-listen", "127.0.0.1:0"]
        self.command = ["setpriv", "--pdeathsig", "TERM", release / "demo-server", *listen, "--dataset", data]
        self.stats = folder / "stats"
        self.settings = dict(os.environ)
        self.log = folder / f"server-{'library' if with_library else 'tcp'}.log"
        self.with_library = with_library
        if with_library:
            self.settings["LD_PRELOAD"] = str(release / "libthallus_shim.so")

    def __enter__(self):
        with open(self.log, "w") as log:
            self.server = subprocess.Popen(
                self.command, env=self.settings, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.address, self.flight = (self.server.stdout.readline().strip() for _ in range(2))
        if not self.flight:
            raise Failed(f"demo-server did not start: {self.log.read_text()}")
        return self

    def __exit__(self, *_):
        self.server.terminate()
        self.server.wait()

    def run(self, sql, transport, *options):
        """The client's summary. `upgraded` is whether its connection left TCP."""
        address = self.flight if transport == "flight" else self.address
        command = [self.client, "--connect", address, "--sql", sql, "--transport", transport, "--summary"]
        settings = self.settings
        if self.with_library:
            self.stats.mkdir(exist_ok=True)
            settings = {**settings, "THALLUS_STATS": str(self.stats)}
        done = subprocess.run([*command, *options], env=settings, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{sql} over {transport}: {done.stderr.strip()}")
        summary = json.loads(done.stdout)
        summary["upgraded"] = False
        for file in self.stats.glob("*.json") if self.with_library else []:
            left = json.loads(file.read_text())
            summary["upgraded"] |= left["upgraded"].get("shm", 0) == 1 and not left["returned_to_tcp"]
            file.unlink()
        return summary


def check(ends, name, sql):
    rows = [ends[library].run(sql, transport, "--checksum") for transport, library in WAYS]
    sums = {(row["rows"], row["checksum"]) for row in rows}
    if len(sums) != 1:
        raise Failed(f"{name}: the results differ: {sums}")
    count, checksum = sums.pop()
    tell(f"{name}: {count} rows, checksum {checksum}, {len(WAYS)} times")


def measure(ends, sql, rounds):
    """The summaries of all rounds by way."""
    results = {way: [] for way in WAYS}
    for _ in range(rounds):
        for transport, library in WAYS:
            results[transport, library].append(ends[library].run(sql, transport))
    return results


def report(arguments, results):
    print(
        f"\nTPC-H at scale factor {arguments.scale:g}, {platform.machine()}, {os.cpu_count()} CPUs; medians of "
        f"{arguments.rounds}, from the request to the last batch, the query included.\n"
    )
    titles = [script.title(*way) for way in WAYS]
    print(f"| result | MB | {' | '.join(titles)} | auto ÷ rpc, TCP |")
    print(f"|---|--:|{'--:|' * len(WAYS)}--:|")
    for name, ways in results.items():
        size = ways["scatter", False][0]["bytes"] / 1e6
        seconds = {way: statistics.median(run["seconds"] for run in runs) for way, runs in ways.items()}
        cells = []
        for way in WAYS:
            stayed = way[1] and not all(run["upgraded"] for run in ways[way])
            rate = f", {size / seconds[way]:,.0f} MB/s" if size >= 1 else ""
            lent = statistics.mean((run["pulled"] + run["borrowed"]) / max(1, run["batches"]) for run in ways[way])
            share = f", {lent:.0%} lent" if lent else ""
            cells.append(f"{seconds[way] * 1000:,.1f} ms{rate}{share}{' (on TCP)' if stayed else ''}")
        ratio = seconds["rpc", False] / seconds["auto", True]
        print(f"| {name} | {size:,.2f} | {' | '.join(cells)} | {ratio:.2f}× |")


if __name__ == "__main__":
    sys.exit(script.run("demo-arrow", demonstrate, parse()))
