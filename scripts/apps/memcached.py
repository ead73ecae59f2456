"""memcached, and memcaslap of libmemcached."""

import re
import socket

from .servers import Server
from .transports import Failed


class Memcached(Server):
    """A memcached with one thread that works, and room for what a run writes."""

    name = "memcached"
    account = "memcache"

    def __init__(self, folder, clients, library=None):
        super().__init__(folder, library)
        self.clients = clients

    def program(self):
        return ["memcached", "-l", "127.0.0.1", "-p", self.port, "-U", 0, "-t", 1, "-c", 1024, "-m", 2048]

    def is_ready(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                return True
        except OSError:
            return False

    def slap(self, transport, clients, seconds):
        """memcaslap: nine of ten requests are GET, values of 1 KiB, one of twenty compared with what was written. Returns its
        result, requests per second, and their number."""
        options = ["-s", f"127.0.0.1:{self.port}", "-T", 1, "-c", clients, "-t", f"{seconds}s", "-v", 0.05]
        done = self.clients.run(transport, ["memcaslap", *options], timeout=seconds + 60)
        counts = dict(re.findall(r"^(\w+): (\d+)$", done.output, re.MULTILINE))
        total = re.search(r"Ops: (\d+) TPS: (\d+)", done.output)
        wrong = [name for name in ("get_misses", "verify_misses", "verify_failed") if counts.get(name) != "0"]
        if not total or wrong or not int(total[1]):
            raise Failed(f"memcaslap over {transport.title} ({', '.join(wrong)}): {done.output}")
        return done, float(total[2]), int(total[1])
