"""scripts/bench: sockets, PostgreSQL, Redis, nginx and memcached over TCP, a Unix socket and Thallus (in place of each), in turn."""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from . import checks, process, script, targets
from .nginx import LARGE, SMALL
from .postgres import SETTINGS, binaries
from .series import markdown, tell
from .transports import CLIENT_ONLY, EACH, Failed, Library, ONE_SIDED, SERVER_ONLY, TCP_ONLY, THALLUS, THALLUS_UNIX, call
from .workloads import Servers, timed

PARTS = ("sockets", "applications", "processes")
SCALE = 10
REPLAY = "replay through psql"

# What the targets are about; the other sizes and the unpinned ping-pong only in the long run.
QUICK = (
    "ping-pong/64/blocking/",
    "ping-pong/64/poll/cores",
    "ping-pong/64/poll/one-core",
    "ping-pong/64/epoll",
    "stream/",
    "connect/",
    "idle/",
)


def parse():
    parser = script.parser("bench", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer, shorter rounds of fewer workloads")
    parser.add_argument("--rounds", type=script.at_least_one, help="measurements of each over each transport (5; quick: 3)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (repeatable)")
    parser.add_argument("--only", action="append", help="only applications whose name contains this text (repeatable)")
    parser.add_argument("--output", type=Path, help="folder for bench.json and bench.md (default: beside the build)")
    return parser.parse_args()


def bench(arguments, folder):
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    parts = arguments.part or PARTS
    output = arguments.output or arguments.release / "bench"
    output.mkdir(parents=True, exist_ok=True)
    results = {"started": datetime.now(timezone.utc).isoformat(timespec="seconds"), "rounds": rounds}
    results |= {"versions": versions(), "postgres_settings": SETTINGS, "pgbench_scale": SCALE}
    text, reached, failed = [facts(results)], [], []

    def of_sockets():
        table, measured, failures = sockets(arguments, rounds, folder)
        text.append(f"## Sockets\n\n{table}")
        reached.extend(targets.of_sockets(measured))
        failed.extend(failures)
        results["sockets"] = measured

    def of_applications():
        workloads, described, failures = applications(arguments, rounds, folder)
        failed.extend(failures)
        text.append(f"## PostgreSQL, Redis, nginx and memcached\n\n{described}")
        reached.extend(targets.of_applications({workload.name: workload for workload in workloads}))
        results["applications"] = [workload.as_json() for workload in workloads]

    def of_processes():
        start_up, memory = processes(arguments, folder)
        text.append(f"## A program without connections\n\n{describe_processes(start_up, memory)}")
        reached.extend(targets.of_processes(start_up, memory))
        results.update({"start_up": start_up, "memory": memory})

    for part, measure in zip(PARTS, (of_sockets, of_applications, of_processes)):
        if part not in parts:
            continue
        tell(f"\n== {part}")
        try:
            measure()
        except Failed as failure:
            # What the other parts have measured, or will, is not lost with it.
            tell(f"\n{part}: FAILED: {failure}")
            text.append(f"FAILED: {part}: {failure}")
            failed.append(f"{part}: {failure}")
    text.append(f"## Targets\n\n{targets.table(reached)}")
    results |= {"targets": [target.as_json() for target in reached], "failures": failed}
    report = "\n\n".join(text) + "\n"
    print(report)
    (output / "bench.md").write_text(report)
    (output / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    tell(f"written: {output / 'bench.md'}, {output / 'bench.json'}")
    if failed:
        raise Failed(f"{len(failed)} measurements, or whole parts")
    return 0


def sockets(arguments, rounds, folder):
    """Runs `thallus bench`: its table, its JSON, its failures."""
    written = folder / "sockets.json"
    command = [arguments.release / "thallus", "bench", "--rounds", rounds, "--json", written]
    if arguments.quick:
        command += ["--seconds", 0.3, *[word for name in QUICK for word in ("--only", name)]]
    environment = {**os.environ, "TMPDIR": str(folder)}
    # Its progress goes where ours does.
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environment)
    # It is there, and empty, before anything is measured.
    if not written.exists() or not written.stat().st_size:
        raise Failed(f"thallus bench ended with status {done.returncode}")
    measured = json.loads(written.read_text())
    return done.stdout, measured, measured["failures"]


def applications(arguments, rounds, folder):
    """The workloads, the text about them, and the failures of others."""
    seconds, recorded = (1, 2) if arguments.quick else (3, 5)
    servers = Servers(folder, arguments.release / "libthallus_shim.so", more=True)
    with servers:
        servers.make_databases({*EACH, *ONE_SIDED}, SCALE)
        wanted = list_workloads(servers, seconds, recorded, folder, arguments)
        workloads, failures = [], []
        for number, workload in enumerate(wanted):
            try:
                workload.run(rounds, f"[{number + 1}/{len(wanted)}] ")
                workloads.append(workload)
            except Failed as failure:
                tell(f"\n{workload.name}: FAILED: {failure}")
                failures.append(f"{workload.name}: {failure}")
        for transport in EACH:
            count = servers.transactions.get(transport, 0)
            checks.balances(servers.postgres(transport), transport, timed(transport), count)
    ends = [f"{server.name} itself: {server.counts().describe()}" for server in servers.preloaded()]
    head = (
        f"Median (lowest–highest) of {rounds} rounds of {seconds} s, transports in turn; unpinned, but the last table (a "
        f"peer without it) on one core. pgbench with one thread, scale {SCALE}; Redis with values of 64 bytes; nginx with one "
        "worker, wrk and memcached with one thread; nine of ten requests to memcached are GET, values of 1 KiB. pgbench and "
        "redis-benchmark first open a short connection of their own. The balances add up after TPC-B, the files of both "
        "nginx are equal, and memcaslap finds what was written."
    )
    failed = [f"FAILED: {failure}" for failure in failures]
    return workloads, "\n\n".join([head, *describe(workloads), *ends, *failed]), failures


def list_workloads(servers, seconds, recorded, folder, arguments):
    wanted = arguments.only or [""]
    # Recorded when it is listed.
    replay = any(text in REPLAY for text in wanted)
    every = every_workload(servers, seconds, recorded if replay else 0, folder, thorough=not arguments.quick)
    workloads = [workload for workload in every if any(text in workload.name for text in wanted)]
    if not workloads:
        raise Failed(f"no application has such a name; there are: {', '.join(workload.name for workload in every)}")
    return workloads


def every_workload(servers, seconds, recorded, folder, thorough):
    select = ("-S", "-M", "prepared")
    # In the long run also those in between.
    connections = (1, 8, 32, 50, 64) if thorough else (1, 8, 50)
    workloads = [
        servers.pgbench(f"pgbench -S -M prepared -c{clients}", EACH, *select, clients=clients, seconds=seconds)
        for clients in connections
    ]
    for clients in (1, 8) if thorough else (1,):
        workloads.append(servers.pgbench(f"pgbench TPC-B -c{clients}", EACH, clients=clients, seconds=seconds))
    if recorded:
        workloads.append(servers.replay(REPLAY, recorded, folder))
    for test in ("GET", "SET"):
        for clients in (1, 8, 50, 500) if thorough else (1, 8, 50):
            name = f"Redis {test} -c{clients}"
            workloads.append(servers.redis_benchmark(name, EACH, test, clients, seconds))
    workloads.append(servers.redis_benchmark("Redis GET -c50 -P16", EACH, "GET", 50, seconds, pipeline=16))
    workloads.append(servers.wrk("nginx 1 KiB, wrk -c50", SMALL, 50, seconds))
    workloads.append(servers.wrk("nginx 1 MiB, wrk -c8", LARGE, 8, seconds))
    workloads.append(servers.slap("memcached -c50", 50, seconds))
    name = "pgbench -S -c1, one transaction per connection"
    workloads.append(servers.pgbench(name, EACH, "-S", "-C", clients=1, seconds=seconds, short=True))
    name = "Redis GET -c1, one request per connection"
    workloads.append(servers.redis_benchmark(name, EACH, "GET", 1, seconds, keep_alive=False))
    # Some percent are looked for here: more than that depends on where the scheduler puts two processes.
    name = "one core, pgbench -S -M prepared -c1"
    workloads.append(servers.pgbench(name, ONE_SIDED, *select, clients=1, seconds=seconds, one_core=True))
    name = "one core, Redis GET -c1"
    workloads.append(servers.redis_benchmark(name, ONE_SIDED, "GET", 1, seconds, one_core=True))
    return workloads


def describe(workloads):
    """A table for each set of transports."""
    for transports, compared, title in (
        (EACH, (THALLUS, THALLUS_UNIX), "Thallus ÷ TCP, over Unix ÷ Unix"),
        (TCP_ONLY, (THALLUS,), "÷ TCP"),
        (ONE_SIDED, (CLIENT_ONLY, SERVER_ONLY), "÷ TCP"),
    ):
        rows = []
        for workload in workloads:
            if workload.transports != transports:
                continue
            values = [workload.spread(transport) for transport in transports]
            ratios = ", ".join(workload.show_ratio(transport) for transport in compared)
            cpu = " / ".join(f"{workload.cpu_per_million(transport):.1f}" for transport in transports)
            path = "; ".join(workload.counts(transport).describe() for transport in transports if transport.client)
            rows.append([workload.name, workload.unit, *values, ratios, cpu, path])
        titles = [transport.title for transport in transports]
        head = ["workload", "unit", *titles, title, "CPU s per million", "connections (client side)"]
        if rows:
            yield markdown(head, rows, right=range(2, len(head) - 1))


def processes(arguments, folder):
    library = Library(arguments.release / "libthallus_shim.so", folder)
    return process.start_up(library, 100 if arguments.quick else 500), process.memory(library, 5)


def describe_processes(start_up, memory):
    rows = []
    for name, times in start_up.items():
        plain, preloaded = (f"{times[kind] * 1e6:,.0f} µs" for kind in ("plain", "preloaded"))
        rows.append([f"start-up and exit of {name}", plain, preloaded, f"{times['ratio']:.2f}×"])
    for kind in ("rss", "pss", "private"):
        sizes = [f"{memory[f'{kind}_{which}'] / 1024:,.0f} KiB" for which in ("plain", "preloaded", "growth")]
        rows.append([f"memory of an idle cat ({kind})", *sizes[:2], f"+{sizes[2]}"])
    return markdown(["", "plain", "preloaded", ""], rows, right=(1, 2, 3))


def versions():
    return {
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "postgres": call([binaries() / "postgres", "--version"]).strip(),
        "redis": call(["redis-server", "--version"]).strip(),
    }


def facts(results):
    with open("/proc/cpuinfo") as cpuinfo:
        models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    known = "; ".join([f"{model}, {len(os.sched_getaffinity(0))} CPUs", *results["versions"].values()])
    settings = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    return f"{results['started']}. {known}.\n\nPostgreSQL with {settings}: the transport is measured, not the disk."


if __name__ == "__main__":
    sys.exit(script.run("bench", bench, parse()))
