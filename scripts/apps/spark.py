"""scripts/demo-spark: unmodified Spark, its shuffle over TCP and with the library, in turn."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from . import script
from .series import markdown, tell
from .servers import free_port
from .transports import Counts, Failed, Library, call

MODES = ["EPOLL", "NIO"]


@dataclass(frozen=True)
class Way:
    """How blocks get from one executor to another."""

    title: str
    library: bool = False
    files: bool = False
    """Executors of one host read each other's files: Spark's own way around the network."""


TCP = Way("TCP")
THALLUS = Way("Thallus", library=True)
FILES = Way("files of the other", files=True)
WAYS = [TCP, THALLUS, FILES]


def parse():
    parser = script.parser("demo-spark", __doc__)
    parser.add_argument("--spark", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--python", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--java", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tpchgen", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=script.above_zero, default=0.5, help="scale factor of TPC-H (default 0.5)")
    parser.add_argument("--pairs", type=script.at_least_one, default=400_000, help="values that GroupBy shuffles (default 400000)")
    parser.add_argument("--size", type=script.at_least_one, default=1000, help="bytes of each (default 1000)")
    parser.add_argument("--workers", type=script.at_least_one, default=2, help="worker processes, with an executor each (default 2)")
    parser.add_argument("--cores", type=script.at_least_one, default=1, help="tasks at once in each executor (default 1)")
    parser.add_argument("--rounds", type=script.at_least_one, default=7, help="measurements of each (default 7)")
    parser.add_argument("--mode", choices=MODES, action="append", help="netty's way to wait (default both)")
    return parser.parse_args()


def demonstrate(arguments, folder):
    data = folder / "tpch"
    tell(f"\n== generate TPC-H at scale factor {arguments.scale:g}")
    # Reading is not what is measured.
    call([arguments.tpchgen, "parquet", "-s", arguments.scale, "-c", "UNCOMPRESSED", "--output-dir", data])
    jobs = {
        f"GroupBy, {arguments.pairs:,} × {arguments.size:,} B": f"GroupBy,{arguments.pairs},{arguments.size}",
        "TPC-H 3": "TPC-H 3",
        "TPC-H 9": "TPC-H 9",
    }
    library = Library(arguments.release / "libthallus_shim.so", folder)
    tell(f"\n== start two clusters, one of them with the library: a master and {arguments.workers} workers each")
    results = {}
    with Cluster(arguments, folder, None) as plain, Cluster(arguments, folder, library) as preloaded:
        for mode in arguments.mode or MODES:
            results[mode] = measure(arguments, {False: plain, True: preloaded}, mode, jobs, data)
        check(results)
    report(arguments, jobs, results, preloaded)
    stayed = [mode for mode, result in results.items() if not result.connections["over shared memory"]]
    if stayed:
        raise Failed(f"no shuffle connection was upgraded: {', '.join(stayed)}")
    return 0


class Cluster:
    """A standalone cluster on this host. Use in a `with`."""

    def __init__(self, arguments, folder, library):
        self.arguments = arguments
        self.folder = folder / ("thallus" if library else "plain")
        self.stats = self.folder / "stats"
        self.stats.mkdir(parents=True)
        self.processes = []
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(arguments.java),
            "SPARK_HOME": str(arguments.spark),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "SPARK_WORKER_DIR": str(self.folder / "work"),
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": str(arguments.python),
            **(library.settings(self.stats) if library else {}),
        }

    def __enter__(self):
        self.master = f"spark://127.0.0.1:{(port := free_port())}"
        try:
            classes = "org.apache.spark.deploy"
            where = ["--host", "127.0.0.1", "--webui-port", "0"]
            self.start(f"{classes}.master.Master", *where, "--port", port, until="Starting Spark master at")
            # Room for two applications at once.
            room = ["--cores", 2 * self.arguments.cores, "--memory", "4g"]
            for _ in range(self.arguments.workers):
                self.start(f"{classes}.worker.Worker", *where, *room, self.master, until="Successfully registered with master")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self, name, *options, until):
        log = self.folder / f"{name.rpartition('.')[2]}-{len(self.processes)}.log"
        # It dies with this script, however that ends.
        command = ["setpriv", "--pdeathsig", "TERM", self.arguments.spark / "bin/spark-class", name, *options]
        with log.open("w") as out:
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )
        deadline = time.monotonic() + 180
        while until not in log.read_text():
            if self.processes[-1].poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self):
        slow = False
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                slow = True
        self.processes.clear()
        if slow:
            raise Failed("a process of Spark's did not stop within 30 s")


class Application:
    """A driver, with executors on a cluster's workers. Use in a `with`."""

    def __init__(self, cluster, mode, way, data):
        arguments = cluster.arguments
        self.folder = cluster.folder / f"{mode}-{'files' if way.files else 'network'}"
        self.events = self.folder / "events"
        self.events.mkdir(parents=True)
        self.log = self.folder / "driver.log"
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.executor.memory": "2g",
            "spark.executor.cores": arguments.cores,
            "spark.cores.max": arguments.cores * arguments.workers,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.shuffle.compress": "false",
            "spark.shuffle.spill.compress": "false",
            "spark.shuffle.io.mode": mode,
            "spark.rpc.io.mode": mode,
            "spark.shuffle.readHostLocalDisk": str(way.files).lower(),
            "spark.sql.autoBroadcastJoinThreshold": -1,
            "spark.sql.shuffle.partitions": 8,
            "spark.sql.warehouse.dir": self.folder / "warehouse",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{self.events}",
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }
        command = [arguments.python, Path(__file__).with_name("spark_job.py"), cluster.master, data]
        self.command = [str(word) for word in command] + [f"{name}={value}" for name, value in settings.items()]
        self.environment = cluster.environment

    def __enter__(self):
        with self.log.open("w") as log:
            self.driver = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *self.command],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.answer()
        return self

    def __exit__(self, *exception):
        self.driver.stdin.close()
        try:
            self.driver.wait(60)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            self.driver.wait()
            raise Failed("Spark's driver did not stop within 60 s") from None
        if self.driver.returncode and not exception[0]:
            raise Failed(f"Spark's driver: {self.log.read_text()[-2000:]}")

    def ask(self, line):
        self.driver.stdin.write(f"{line}\n")
        self.driver.stdin.flush()
        return self.answer()

    def answer(self):
        # Ends at the latest when the driver does.
        line = self.driver.stdout.readline()
        if not line:
            raise Failed(f"Spark's driver: {self.log.read_text()[-3000:]}")
        return json.loads(line)

    def shuffles(self):
        """By group: what its stages that read a shuffle took, and read. Complete once the driver has ended."""
        (log,) = self.events.iterdir()
        groups, found = {}, {}
        for line in log.open():
            event = json.loads(line)
            if event["Event"] == "SparkListenerJobStart":
                group = event["Properties"].get("spark.jobGroup.id")
                groups.update(dict.fromkeys(event["Stage IDs"], group))
            elif event["Event"] == "SparkListenerTaskEnd":
                read = event["Task Metrics"]["Shuffle Read Metrics"]
                remote, local = read["Remote Bytes Read"], read["Local Bytes Read"]
                if remote + local:
                    entry = found.setdefault(groups[event["Stage ID"]], Counter())
                    entry["remote"] += remote
                    entry["local"] += local
                    entry["waited"] += read["Fetch Wait Time"] / 1000
                    entry["requests"] += read.get("Remote Requests Duration", 0) / 1000
                    entry["tasks"] += event["Task Metrics"]["Executor Run Time"] / 1000
        return found


@dataclass
class Result:
    """What one mode has led to."""

    runs: dict
    """By job and way: the driver's answers, with what the event log says of them as `shuffle`."""
    connections: Counter
    """Between executors, as the library showed them before the end."""


def measure(arguments, clusters, mode, jobs, data):
    tell(f"\n== netty's {mode}: {arguments.rounds} rounds, all ways in turn")
    runs = {}
    applications = {way: Application(clusters[way.library], mode, way, data) for way in WAYS}
    with applications[TCP], applications[THALLUS], applications[FILES]:
        for name, line in jobs.items():
            # The virtual machines compile what is hot.
            for number in range(-2, arguments.rounds):
                for way, application in applications.items():
                    answer = application.ask(line)
                    if number >= 0:
                        runs.setdefault((name, way), []).append(answer)
            tell(f"{name}: " + ", ".join(f"{way.title} {median(runs[name, way], 'seconds'):.2f} s" for way in WAYS))
        managers = applications[THALLUS].ask("connections")["managers"]
        connections = shuffle_connections(arguments, managers)
    for way, application in applications.items():
        shuffles = application.shuffles()
        for (_, of), answers in runs.items():
            for answer in answers if of == way else []:
                answer["shuffle"] = shuffles[answer["group"]]
    return Result(runs, connections)


def shuffle_connections(arguments, managers):
    """How the connections to block managers travel, each counted at the end that made it."""
    listed = json.loads(call([arguments.release / "thallus", "status", "--json"]))["connections"]
    ours = [end for end in listed if end["role"] == "client" and end["peer"] in managers]
    return Counter("over shared memory" if end["fabric"] == "shm" else end["reason"] for end in ours)


def median(answers, name):
    return statistics.median(answer[name] for answer in answers)


def check(results):
    sums = {}
    for result in results.values():
        for (name, _), answers in result.runs.items():
            sums.setdefault(name, set()).update((answer["rows"], answer["digest"]) for answer in answers)
    for name, found in sums.items():
        if len(found) != 1:
            raise Failed(f"{name}: the results differ: {found}")
    tell("\nall: the results of all rounds are equal")


def report(arguments, jobs, results, preloaded):
    head = ["netty", "job", "MB between executors", *[f"{way.title}, s" for way in WAYS]]
    head += ["TCP ÷ Thallus", "waited for blocks, TCP and Thallus, ms", "their requests, ms"]
    rows = []
    for mode, result in results.items():
        for name in jobs:
            runs = {way: result.runs[name, way] for way in WAYS}
            seconds = {way: [run["seconds"] for run in runs[way]] for way in WAYS}

            def shuffled(way, key):
                return statistics.median(run["shuffle"][key] for run in runs[way])

            def both(key):
                return f"{shuffled(TCP, key) * 1000:,.0f}, {shuffled(THALLUS, key) * 1000:,.0f}"

            cells = [
                f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})" for values in seconds.values()
            ]
            ratio = statistics.median(seconds[TCP]) / statistics.median(seconds[THALLUS])
            megabytes = f"{shuffled(THALLUS, 'remote') / 1e6:,.1f}"
            rows.append([mode, name, megabytes, *cells, f"{ratio:.2f}×", both("waited"), both("requests")])
    print(
        f"\nSpark with {arguments.workers} workers, an executor of {arguments.cores} core(s) each, on {os.cpu_count()} "
        f"CPUs, {platform.machine()}, Linux {platform.release()}. TPC-H at scale factor {arguments.scale:g}, no "
        f"broadcast joins, shuffles not compressed. Median (lowest–highest) of {arguments.rounds} rounds, whole jobs; "
        "the last columns are sums over tasks.\n"
    )
    print(markdown(head, rows, right=range(2, len(head))))
    for mode, result in results.items():
        shown = ", ".join(f"{count} {name}" for name, count in result.connections.most_common())
        print(f"\n{mode}: connections to where executors serve blocks: {shown}", end="")
    print(f"\nall processes of Spark, both ends: {Counts.read(preloaded.stats).describe()}")


if __name__ == "__main__":
    sys.exit(script.run("demo-spark", demonstrate, parse()))
