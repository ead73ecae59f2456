"""Tornado's own tests, from PyPI."""

from pathlib import Path

from apps.transports import Failed, call

from .cpython import PYTHON
from .suite import Suite
from .ways import run

VERSION = "6.6.1"

MODULES = [
    "asyncio_test",
    "circlerefs_test",
    "http1connection_test",
    "httpclient_test",
    "httpserver_test",
    "ioloop_test",
    "iostream_test",
    "netutil_test",
    "process_test",
    "simple_httpclient_test",
    "tcpclient_test",
    "tcpserver_test",
    "testing_test",
    "web_test",
    "websocket_test",
    "wsgi_test",
]

SILENCE = 60

SETTINGS = {"QUIET_LOGGERS": "tornado.access"}
"""As Tornado's own runner has it: a test fails if something is logged that it does not expect."""


class Tornado(Suite):
    name = "tornado"

    def prepare(self, cache):
        self.python = Path(cache) / "tornado" / VERSION / "bin/python"
        if not self.python.exists():
            call([PYTHON, "-m", "venv", self.python.parent.parent])
            pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            call([*pip, f"tornado=={VERSION}"])

    def version(self):
        return f"Tornado {VERSION}"

    def parts(self):
        return MODULES, []

    def run(self, part, way, folder, only=None):
        log, results = folder / "log", folder / "results"
        command = [self.python, "-P", Path(__file__).parent / "unittests.py", results, f"tornado.test.{part}"]
        status = run(way, [*command, *(["--", *sorted(only)] if only else [])], log, SILENCE, SETTINGS)
        if not results.exists():
            raise Failed(f"{part} ran no test: exit status {status}: {log}")
        outcomes = {}
        for line in results.read_text().splitlines():
            test, _, outcome = line.partition("\t")
            if test.startswith("unittest.loader."):
                raise Failed(f"{part} can't be loaded: {log}")
            outcomes[test] = outcome
        # A test that is still running ended the run.
        return {test: "hung or died" if outcome == "started" else outcome for test, outcome in outcomes.items()}
