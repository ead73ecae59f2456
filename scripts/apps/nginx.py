"""nginx, and wrk."""

import hashlib
import re
import urllib.request

from .servers import Server
from .transports import Failed

SMALL, LARGE = 1024, 1 << 20
"""Bytes of the files."""


class Nginx(Server):
    """An nginx with one worker that serves two files."""

    name = "nginx"
    account = "www-data"

    def __init__(self, folder, clients, library=None):
        super().__init__(folder, library)
        self.clients = clients
        self.files = self.folder / "files"

    def prepare(self):
        self.files.mkdir()
        for size in (SMALL, LARGE):
            block = hashlib.sha512(str(size).encode()).digest()
            (self.files / str(size)).write_bytes(block * (size // len(block)))
        temporary = "\n".join(
            f"{kind}_temp_path {self.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (self.folder / "nginx.conf").write_text(
            f"""daemon off; worker_processes 1; pid {self.folder}/pid; error_log stderr error;
            env LD_PRELOAD; env THALLUS_STATS;
            events {{ worker_connections 1024; }}
            http {{
                access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; keepalive_timeout 600;
                {temporary}
                server {{ listen 127.0.0.1:{self.port}; root {self.files}; }}
            }}"""
        )
        self.give(self.folder)

    def program(self):
        return ["/usr/sbin/nginx", "-c", self.folder / "nginx.conf"]

    def is_ready(self):
        try:
            return len(self.fetch(SMALL)) == SMALL
        except OSError:
            return False

    def fetch(self, size):
        """A file, without the library."""
        # Whatever proxy the environment names.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://127.0.0.1:{self.port}/{size}", timeout=5) as answer:
            return answer.read()

    def wrk(self, transport, size, clients, seconds):
        """wrk on keep-alive connections; returns its result, requests per second, and their number."""
        url = f"http://127.0.0.1:{self.port}/{size}"
        done = self.clients.run(transport, ["wrk", "-t", 1, "-c", clients, "-d", f"{seconds}s", url], timeout=seconds + 60)
        rate = re.search(r"^Requests/sec: +([0-9.]+)", done.output, re.MULTILINE)
        count = re.search(r"^ +(\d+) requests in [0-9.]+\w+, ([0-9.]+)(\w+) read", done.output, re.MULTILINE)
        if not rate or not count or "Socket errors" in done.output or "Non-2xx" in done.output:
            raise Failed(f"wrk over {transport.title}: {done.output}")
        # A body that is short or missing is an error of the connection; what is read also tells of one that is too long.
        read = float(count[2]) * {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}[count[3]]
        each = read / int(count[1])
        if not size <= each * 1.01 or not each <= (size + 400) * 1.01 + size * clients / int(count[1]):
            raise Failed(f"wrk over {transport.title} read {each:.0f} bytes for each file of {size}: {done.output}")
        return done, float(rate[1]), int(count[1])
