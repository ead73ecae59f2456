"""How a suite's commands are run: natively, or under the library with its statistics."""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from apps.transports import Counts

SETTINGS = {"THALLUS_UPGRADE_AFTER": "1"}
"""Tests make few calls on a connection: each looks for its peer at its first one."""


class Native:
    name = "native"
    title = "natively"

    def command(self, command):
        return [str(word) for word in command]

    def settings(self):
        return {}


class Preloaded:
    name = "library"
    title = "under the library"

    def __init__(self, release, folder):
        # Where every user can read it.
        programs = Path(folder) / "bin"
        programs.mkdir()
        for name in ("thallus", "libthallus_shim.so"):
            shutil.copy(Path(release) / name, programs)
        self.thallus = programs / "thallus"
        self.stats = Path(folder) / "stats"
        self.stats.mkdir(exist_ok=True)
        # Programs that tests start as another user write theirs, too.
        self.stats.chmod(0o1777)

    def command(self, command):
        return [str(word) for word in (self.thallus, "run", "--stats", self.stats, "--", *command)]

    def settings(self):
        return SETTINGS

    def counts(self):
        return Counts.read(self.stats)


class Runs:
    """Process groups that are running, so that none is left when the script is interrupted."""

    def __init__(self):
        self.groups = set()
        self.stopped = False
        self.lock = threading.Lock()

    def start(self, *arguments, **options):
        with self.lock:
            if self.stopped:
                raise InterruptedError
            process = subprocess.Popen(*arguments, **options, process_group=0)
            self.groups.add(process.pid)
            return process

    def end(self, process, number=signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def forget(self, process):
        with self.lock:
            self.groups.discard(process.pid)

    def stop(self):
        with self.lock:
            self.stopped = True
            for group in self.groups:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)


RUNS = Runs()


def run(way, command, log, silence, settings=None, folder=None):
    """Appends the output of `command` to the file `log`. Its exit status, or None if it has written nothing for
    `silence` seconds; then it is aborted. What it leaves behind in its process group is killed."""
    environment = {**os.environ, **way.settings(), **(settings or {})}
    with open(log, "ab") as output:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = RUNS.start(way.command(command), env=environment, cwd=folder, **pipes)
        try:
            return wait(process, log, silence)
        finally:
            RUNS.end(process)
            process.wait()
            RUNS.forget(process)


def wait(process, log, silence):
    size, since = 0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
        now = os.stat(log).st_size
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > silence:
            # Some programs show where they are.
            RUNS.end(process, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return None
