"""How a connection travels, and what the library says about it afterwards."""

import json
import os
import resource
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


class Failed(Exception):
    """Something that must not be: a program failed, or a result differs."""


@dataclass(frozen=True)
class Transport:
    """One way from a client to a server: the socket family, and who has the library preloaded."""

    name: str
    title: str
    unix: bool = False
    client: bool = False
    server: bool = False


TCP = Transport("tcp", "TCP")
UNIX = Transport("unix", "Unix socket", unix=True)
THALLUS = Transport("thallus", "Thallus", client=True, server=True)
THALLUS_UNIX = Transport("thallus-unix", "Thallus over a Unix socket", unix=True, client=True, server=True)
CLIENT_ONLY = Transport("client-only", "only the client has it", client=True)
SERVER_ONLY = Transport("server-only", "only the server has it", server=True)

EACH = (TCP, UNIX, THALLUS, THALLUS_UNIX)
ONE_SIDED = (TCP, CLIENT_ONLY, SERVER_ONLY)
TCP_ONLY = (TCP, THALLUS)
"""Of programs that can't use a Unix socket."""


@dataclass
class Counts:
    """What the library counted in one or several processes (THALLUS_STATS)."""

    processes: int = 0
    upgraded: Counter = field(default_factory=Counter)
    not_upgraded: Counter = field(default_factory=Counter)
    returned: int = 0
    """Those of `upgraded` that went back."""
    ring_bytes: int = 0
    tcp_bytes: int = 0

    @classmethod
    def read(cls, folder):
        """Adds up everything that processes left in `folder`."""
        counts = cls()
        for path in Path(folder).glob("*.json"):
            left = json.loads(path.read_text())
            counts.processes += 1
            counts.upgraded.update(left["upgraded"])
            counts.not_upgraded.update(left["not_upgraded"])
            counts.returned += left["returned_to_tcp"]
            counts.ring_bytes += left["ring_bytes_sent"] + left["ring_bytes_received"]
            counts.tcp_bytes += left["tcp_bytes_sent"] + left["tcp_bytes_received"]
        return counts

    def __add__(self, other):
        return Counts(
            self.processes + other.processes,
            self.upgraded + other.upgraded,
            self.not_upgraded + other.not_upgraded,
            self.returned + other.returned,
            self.ring_bytes + other.ring_bytes,
            self.tcp_bytes + other.tcp_bytes,
        )

    def describe(self):
        """`50 of 50 over shared memory, 1 too short to gain (reasons of the rest)`."""
        if not self.processes:
            return "no counters were written"
        moved = self.upgraded.total()
        rest = self.not_upgraded.copy()
        short = rest.pop("short", 0)
        text = f"{moved} of {moved + rest.total()} over shared memory"
        if self.returned:
            text += f", of which {self.returned} went back"
        if short:
            text += f", {short} too short to gain"
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(rest.items()))
        return f"{text} ({reasons})" if reasons else text

    def as_json(self):
        return {
            "processes": self.processes,
            "upgraded": dict(self.upgraded),
            "not_upgraded": dict(self.not_upgraded),
            "returned_to_tcp": self.returned,
            "ring_bytes": self.ring_bytes,
            "tcp_bytes": self.tcp_bytes,
        }


@dataclass
class Finished:
    """A client program that has ended well."""

    output: str
    seconds: float
    cpu_seconds: float
    counts: Counts


class Library:
    """The preloaded library, as a copy that every user can read."""

    def __init__(self, path, folder):
        self.path = Path(folder) / Path(path).name
        # The loader would go on without it, and what is measured would be a program without the library.
        if any(character in str(self.path) for character in " :$"):
            wrong = "LD_PRELOAD can't express a space, a colon or a dollar sign"
            raise Failed(f"{wrong}: set TMPDIR to another folder than {tempfile.gettempdir()}")
        self.path.write_bytes(Path(path).read_bytes())
        self.path.chmod(0o755)

    def settings(self, stats=None):
        """Environment variables that put a program under the library; its counters go to the folder `stats`."""
        preload = {"LD_PRELOAD": str(self.path)}
        return {**preload, "THALLUS_STATS": str(stats)} if stats else preload


class Clients:
    """Starts client programs, with the library where the transport says so."""

    def __init__(self, library, folder):
        self.library = library
        self.folder = Path(folder)

    def run(self, transport, command, settings=None, timeout=300, stdin=None):
        """Runs `command` to its end. Raises Failed if it can't be started, fails, or hangs."""
        with tempfile.TemporaryDirectory(dir=self.folder) as stats:
            environment = {**os.environ, **(settings or {})}
            if transport.client:
                environment |= self.library.settings(stats)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            output = call(command, environment, timeout, stdin)
            seconds = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
            return Finished(output, seconds, cpu, Counts.read(stats))


def call(command, environment=None, timeout=300, stdin=None, folder=None):
    """Runs `command` and returns its standard output. Raises Failed if it fails or hangs."""
    command = [str(word) for word in command]
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout, input=stdin or "", capture_output=True, text=True, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"did not end within {timeout} s: {shown}") from None
    except OSError as error:
        raise Failed(f"can't run {shown}: {error}") from None
    if done.returncode:
        raise Failed(f"exit status {done.returncode}: {shown}\n{done.stderr.strip()}\n{done.stdout[-2000:]}")
    return done.stdout
