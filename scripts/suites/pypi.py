"""Suites in Python that their packages on PyPI bring along: Tornado's and gevent's."""

from pathlib import Path

from apps.transports import Failed, call

from .cpython import PYTHON
from .suite import Suite, once
from .ways import run

SILENCE = 60


class Packaged(Suite):
    """Test modules of the package `name` in `version`."""

    title = version_number = place = ""
    modules = []
    settings = {}

    def prepare(self, cache):
        folder = Path(cache) / self.name / self.version_number
        self.python = folder / "bin/python"

        def make():
            call([PYTHON, "-m", "venv", folder])
            pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            call([*pip, f"{self.name}=={self.version_number}"])

        once(folder, make)

    def version(self):
        return f"{self.title} {self.version_number}"

    def parts(self):
        return self.modules, []

    def run(self, part, way, folder, only=None):
        log, results = folder / "log", folder / "results"
        command = [self.python, "-P", Path(__file__).parent / "unittests.py", results, f"{self.place}.{part}"]
        status = run(way, [*command, *(["--", *sorted(only)] if only else [])], log, SILENCE, self.settings)
        if not results.exists():
            raise Failed(f"{part} ran no test: exit status {status}: {log}")
        outcomes = {"(the run)": f"exit status {status}"}
        for line in results.read_text().splitlines():
            test, _, outcome = line.partition("\t")
            if test.startswith("unittest.loader."):
                raise Failed(f"{part} can't be loaded: {log}")
            # A test that is still running ended the run.
            outcomes[test] = "hung or died" if outcome == "started" else outcome
        return outcomes


class Tornado(Packaged):
    name = "tornado"
    title = "Tornado"
    version_number = "6.6.1"
    place = "tornado.test"
    modules = [
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
    # As its own runner has it: a test fails if something is logged that it does not expect.
    settings = {"QUIET_LOGGERS": "tornado.access"}


class Gevent(Packaged):
    name = title = "gevent"
    version_number = "26.9.0"
    place = "gevent.tests"
    modules = [
        "test__socket",
        "test__socket_close",
        "test__socket_errors",
        "test__socket_ex",
        "test__socket_send_memoryview",
        "test__socket_timeout",
        "test__socket_ssl",
        "test__ssl",
        "test__server",
        "test__server_pywsgi",
        "test__pywsgi",
        "test__makefile_ref",
        "test__select",
        "test__selectors",
        "test__greenio",
        "test__backdoor",
        "test__close_backend_fd",
        "test__example_echoserver",
        "test__example_portforwarder",
        "test__example_wsgiserver",
    ]
