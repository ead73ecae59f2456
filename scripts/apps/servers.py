"""Private servers: in a folder of their own, on free ports, gone when the script is."""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from .transports import Counts, Failed

PORTS = range(15400, 15900)
"""Below the ports that the kernel hands to clients: none can take ours between the test and its use."""


class Folder:
    """A temporary folder that every user can enter. Use in a `with`; it is removed on the way out."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        self.path = Path(tempfile.mkdtemp(prefix=f"{self.name}."))
        self.path.chmod(0o755)
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)


def free_port():
    # In any order: somebody else may be looking, too.
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                # As the servers do it: a port with connections in TIME_WAIT is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise Failed(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


class Server:
    """A server process, with the library or without. Use in a `with`.

    A subclass gives `program()`, the command; `is_ready()`; and `account`, the user that it runs as if the
    script runs as root (PostgreSQL refuses to be root, and Redis need not be).
    """

    name = account = ""
    stop_signal = signal.SIGTERM

    def __init__(self, folder, library=None):
        self.library = library
        self.folder = Path(folder) / (self.name + ("-thallus" if library else ""))
        self.stats = self.folder / "stats"
        for path in (self.folder, self.stats):
            path.mkdir()
            self.give(path)
        self.log = self.folder / "log"

    def __enter__(self):
        self.port = free_port()
        self.prepare()
        environment = self.library.settings(self.stats) if self.library else {}
        settings = [f"{name}={value}" for name, value in environment.items()]
        # Only the server itself gets the library, not what starts it.
        command = [*self.as_account(), "env", *settings, *self.program()]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        try:
            self.await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def prepare(self):
        """What has to be done before the first start."""

    def as_account(self):
        """The command that drops root, and lets the server die with this script, however that ends."""
        command = ["setpriv", "--pdeathsig", signal.Signals(self.stop_signal).name[3:]]
        if os.geteuid() == 0:
            command += ["--reuid", self.account, "--regid", self.account, "--init-groups"]
        return command

    def give(self, path):
        """Makes `path` belong to the user that the server runs as."""
        if os.geteuid() == 0:
            entry = pwd.getpwnam(self.account)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def await_ready(self):
        deadline = time.monotonic() + 60
        while not self.is_ready():
            if self.process.poll() is not None:
                raise Failed(f"{self.name} left at once:\n{self.log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name} is not ready after 60 s:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self):
        """Ends the server. Raises Failed if it had ended by itself, or does not end."""
        ended = self.process.poll()
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Failed(f"{self.name} did not stop within 30 s") from None
        if ended is not None and sys.exc_info()[0] is None:
            raise Failed(f"{self.name} ended with status {ended}:\n{self.log.read_text()[-2000:]}")

    @contextmanager
    def on_one_core(self):
        """Within, this server and what is started run on the same core, the first that is allowed."""
        allowed = os.sched_getaffinity(0)
        try:
            self.move_to({min(allowed)})
            yield
        finally:
            self.move_to(allowed)

    def move_to(self, cpus):
        """Moves this script, which starts the clients, and every process of the server."""
        for pid in (0, self.process.pid):
            os.sched_setaffinity(pid, cpus)
        for pid in self.children():
            # One may be ending.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(pid, cpus)

    def children(self):
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def cpu_seconds(self):
        """User and system time of the server and its children, those that have ended included."""
        ticks = sum(self.ticks(self.process.pid, children=True))
        for pid in self.children():
            # One may be ending; the next reading has it in the server's own account.
            with suppress(FileNotFoundError, ProcessLookupError):
                ticks += sum(self.ticks(pid))
        return ticks / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def ticks(pid, children=False):
        """utime and stime, and those of the children that have been waited for: proc_pid_stat(5)."""
        # Behind the command, which may hold anything, from field 3 on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return [int(value) for value in fields[11 : 15 if children else 13]]

    def counts(self):
        """What the library counted on this side; complete once the server has stopped."""
        return Counts.read(self.stats)
