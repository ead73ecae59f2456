"""What the library costs a program that has nothing to do with it: start-up time and memory, in pairs."""

import os
import statistics
import subprocess
import sys
import time

from .series import tell
from .transports import Failed

TRUE = ["/bin/true"]
PYTHON = [sys.executable, "-I", "-S", "-c", "pass"]


def start_up(library, pairs):
    """Wall time from spawn to exit, without the library and with it, in turn: command → results in seconds."""
    results = {}
    for command in (TRUE, PYTHON):
        plain, preloaded = [], []
        for _ in range(pairs):
            plain.append(lifetime(command, {}))
            preloaded.append(lifetime(command, library.settings()))
        name = os.path.basename(command[0])
        results[name] = {
            "pairs": pairs,
            "plain": statistics.median(plain),
            "preloaded": statistics.median(preloaded),
            "quartiles_plain": statistics.quantiles(plain)[::2],
            "quartiles_preloaded": statistics.quantiles(preloaded)[::2],
            "ratio": statistics.median(plain) / statistics.median(preloaded),
        }
        tell(f"start-up of {name}: {statistics.median(plain):.6f} s, {statistics.median(preloaded):.6f} s with it")
    return results


def lifetime(command, settings):
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, {**os.environ, **settings})
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise Failed(f"{command[0]} ended with status {os.waitstatus_to_exitcode(status)}")
    return seconds


def memory(library, pairs):
    """Resident bytes of an idle `cat`, without the library and with it, in turn."""
    plain = [idle_memory({}) for _ in range(pairs)]
    preloaded = [idle_memory(library.settings()) for _ in range(pairs)]
    results = {"pairs": pairs}
    for kind in ("Rss", "Pss", "Private"):
        results[f"{kind.lower()}_plain"] = statistics.median(sample[kind] for sample in plain)
        results[f"{kind.lower()}_preloaded"] = statistics.median(sample[kind] for sample in preloaded)
        results[f"{kind.lower()}_growth"] = results[f"{kind.lower()}_preloaded"] - results[f"{kind.lower()}_plain"]
    tell(f"an idle process: {results['rss_growth'] / 1024:+.0f} KiB with it")
    return results


def idle_memory(settings):
    """Bytes by kind, as smaps_rollup has them, of a process that has started and waits."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["/bin/cat"], env={**os.environ, **settings}, **pipes) as cat:
        cat.stdin.write(b"\n")
        cat.stdin.flush()
        # Its answer says that it is up.
        cat.stdout.readline()
        sizes = {}
        with open(f"/proc/{cat.pid}/smaps_rollup") as rollup:
            for line in list(rollup)[1:]:
                name, value = line.split()[:2]
                sizes[name.rstrip(":")] = int(value) * 1024
        cat.stdin.close()
    sizes["Private"] = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return sizes
