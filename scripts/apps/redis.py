"""Redis, redis-benchmark and redis-cli."""

import csv

from .servers import Server
from .transports import Failed, UNIX

FORBIDDEN = ("CONFIG", "MODULE", "REPLICAOF", "SLAVEOF", "SAVE", "BGSAVE", "DEBUG", "SHUTDOWN")
"""Commands that would let another local user do something with the account that Redis runs as."""

DATA = 64
"""Bytes of a value in the benchmarks."""


class Redis(Server):
    """A Redis that keeps nothing on disk."""

    name = account = "redis"

    def __init__(self, folder, clients, library=None):
        super().__init__(folder, library)
        self.clients = clients
        self.socket = self.folder / "socket"

    def prepare(self):
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"unixsocket {self.socket}",
            f"dir {self.folder}",
            'save ""',
            "appendonly no",
            "daemonize no",
            "maxclients 2000",
            *(f'rename-command {command} ""' for command in FORBIDDEN),
        ]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")

    def program(self):
        return ["redis-server", self.folder / "redis.conf"]

    def is_ready(self):
        if not self.socket.exists():
            return False
        try:
            return self.cli(UNIX, "PING\n").output.strip() == "PONG"
        except Failed:
            return False

    def address(self, transport):
        return ["-s", self.socket] if transport.unix else ["-h", "127.0.0.1", "-p", self.port]

    def cli(self, transport, commands, database=0):
        """Runs `commands`, one a line, on one connection; their replies are the output, one a line."""
        return self.clients.run(transport, ["redis-cli", *self.address(transport), "-n", database], stdin=commands)

    def benchmark(self, transport, test, clients, requests, keep_alive=True, pipeline=1):
        """redis-benchmark with `pipeline` requests at once on each connection; returns its result and requests per second."""
        options = ["-t", test, "-c", clients, "-n", requests, "-d", DATA, "-k", int(keep_alive), "-P", pipeline, "--csv"]
        command = ["redis-benchmark", *self.address(transport), *options]
        done = self.clients.run(transport, command, timeout=120)
        for row in csv.reader(done.output.splitlines()):
            if row and row[0].upper() == test.upper():
                return done, float(row[1])
        raise Failed(f"redis-benchmark over {transport.title}: {done.output}")
