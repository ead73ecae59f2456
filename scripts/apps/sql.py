"""scripts/bench-sql: TPC-H, or two queries over TPC-C, on several processes by datafusion-distributed, its own transport and ours, over TCP and with the library."""

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
from .transports import Failed, call

# (transport, whether all processes have the library). The first is what the others are compared with.
WAYS = [("grpc", False), ("thallus", False), ("grpc", True), ("thallus", True)]


def parse():
    parser = script.parser("bench-sql", __doc__)
    tpch.add_arguments(parser)
    parser.add_argument("--engine", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--warehouses", type=script.at_least_one, metavar="N", help="two queries over the tables of TPC-C for N warehouses, instead of TPC-H")
    parser.add_argument("--workers", type=script.at_least_one, default=4, help="processes that compute (default 4)")
    parser.add_argument("--rounds", type=script.at_least_one, default=5, help="measurements of each, after one that does not count (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every measurement there")
    parser.add_argument("queries", type=int, nargs="*", metavar="N", help="numbers of queries (default all)")
    arguments = parser.parse_args()
    if arguments.warehouses is not None and arguments.queries:
        parser.error("numbers are those of TPC-H")
    known = sorted(tpch.QUERIES) if arguments.warehouses is None else [1, 2]
    arguments.queries = arguments.queries or known
    for number in arguments.queries:
        if number not in known:
            parser.error(f"there is no query {number}")
    return arguments


def measure(arguments, folder):
    if arguments.json:
        # Not only when all has been measured.
        try:
            arguments.json.open("a").close()
        except OSError as error:
            raise Failed(f"can't write {arguments.json}: {error.strerror}") from None
    data = folder / "tables"
    if arguments.warehouses is None:
        tpch.generate(arguments, data)
    else:
        tell(f"\n== generate TPC-C for {arguments.warehouses} warehouses")
        call([arguments.engine, "generate", data, "--warehouses", str(arguments.warehouses)])
    samples = []
    with Cluster(arguments, folder, False) as plain, Cluster(arguments, folder, True) as preloaded:
        for number in range(-1, arguments.rounds):
            # Not always in the same order.
            clusters = (plain, preloaded) if number % 2 else (preloaded, plain)
            for cluster in clusters:
                tell(f"round {number + 1} of {arguments.rounds}, {'with the library' if cluster.library else 'TCP'}")
                transports = ["thallus", "grpc"] if number % 4 < 2 else ["grpc", "thallus"]
                run = cluster.bench(data, transports)
                samples.extend({**sample, "round": number} for sample in run if number >= 0)
    report(arguments, samples)
    if arguments.json:
        size = {"scale": arguments.scale} if arguments.warehouses is None else {"warehouses": arguments.warehouses}
        arguments.json.write_text(json.dumps({**size, "samples": samples}, indent=1))
    return 0


class Cluster:
    """Workers, with the library or without."""

    def __init__(self, arguments, folder, library):
        self.arguments = arguments
        self.library = library
        self.settings = dict(os.environ)
        self.logs = folder / f"workers-{'library' if library else 'tcp'}.log"
        self.workers = []
        if library:
            self.settings["LD_PRELOAD"] = str(arguments.release / "libthallus_shim.so")

    def __enter__(self):
        # They die with this script, however that ends.
        command = ["setpriv", "--pdeathsig", "TERM", self.arguments.engine, "worker", "--listen", "127.0.0.1:0"]
        with open(self.logs, "w") as log:
            for _ in range(self.arguments.workers):
                worker = subprocess.Popen(command, env=self.settings, stdout=subprocess.PIPE, stderr=log, text=True)
                self.workers.append(worker)
        self.addresses = [worker.stdout.readline().strip() for worker in self.workers]
        if not all(self.addresses):
            self.__exit__()
            raise Failed(f"a worker did not start: {self.logs.read_text()}")
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.wait()

    def bench(self, data, transports):
        """What each query took once by each transport. The program compares rows and checksums with those of one process."""
        command = [self.arguments.engine, "bench", "--workers", ",".join(self.addresses), "--rounds", "1"]
        command += ["--data", data, "--transports", ",".join(transports), "--"]
        if self.arguments.warehouses is None:
            command += [tpch.query(number, self.arguments.scale) for number in self.arguments.queries]
        done = subprocess.run(command, env=self.settings, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{done.stderr.strip()}\n{self.logs.read_text()}")
        samples = [json.loads(line) for line in done.stdout.splitlines()]
        for sample in samples:
            sample["library"] = self.library
            sample["query"] = self.arguments.queries[sample["query"]]
        return samples


def report(arguments, samples):
    size = f"TPC-H at scale factor {arguments.scale:g}" if arguments.warehouses is None else f"TPC-C, {arguments.warehouses} warehouses"
    print(
        f"\n{size}, {arguments.workers} workers, {platform.machine()}, {os.cpu_count()} CPUs; "
        f"milliseconds: medians of {arguments.rounds} (least to most). Each result equal to that of one process.\n"
    )
    titles = [script.title(*way) for way in WAYS]
    print(f"| query | {' | '.join(titles)} | {' | '.join(f'× {title}' for title in titles[1:])} | MB | in memory |")
    print(f"|---|{'--:|' * (2 * len(WAYS) + 1)}")
    medians = {way: {} for way in WAYS}
    for number in arguments.queries:
        cells, carried = [], []
        for way in WAYS:
            taken = [sample for sample in samples if (sample["transport"], sample["library"], sample["query"]) == (*way, number)]
            seconds = [sample["seconds"] * 1000 for sample in taken]
            medians[way][number] = statistics.median(seconds)
            cells.append(f"{medians[way][number]:,.1f} ({min(seconds):,.1f} to {max(seconds):,.1f})")
            carried = taken
        sizes = [sample["bytes"] for sample in carried]
        share = sum(sample["ring_bytes"] for sample in carried) / max(1, sum(sizes))
        print(f"| {number} | {' | '.join(cells)} | {ratios(medians, number)} | {statistics.median(sizes) / 1e6:,.2f} | {share:.0%} |")
    totals = {way: {0: sum(medians[way].values())} for way in WAYS}
    cells = [f"{totals[way][0]:,.0f}" for way in WAYS]
    print(f"| all | {' | '.join(cells)} | {ratios(totals, 0)} | | |")
    worst = [min(medians[WAYS[0]][number] / medians[way][number] for number in arguments.queries) for way in WAYS[1:]]
    print(f"| worst |{' |' * len(WAYS)} {' | '.join(f'{ratio:.2f}' for ratio in worst)} | | |")
    connections(samples)


def ratios(medians, number):
    """How many times as fast as the engine's own transport over TCP."""
    return " | ".join(f"{medians[WAYS[0]][number] / medians[way][number]:.2f}" for way in WAYS[1:])


def connections(samples):
    """What carried the workers' connections, where most were on TCP after a query."""
    print()
    for transport, library in WAYS:
        taken = [sample for sample in samples if (sample["transport"], sample["library"]) == (transport, library)]
        worst = max(taken, key=lambda sample: sample["on_tcp"])
        reasons = f" ({', '.join(sorted(set(worst['reasons'])))})" if library and worst["reasons"] else ""
        print(
            f"- {script.title(transport, library)}: of the connections that workers had accepted, after each query "
            f"at most {worst['on_tcp']} on TCP{reasons}, then {worst['in_memory']} in memory"
        )


if __name__ == "__main__":
    sys.exit(script.run("bench-sql", measure, parse()))
