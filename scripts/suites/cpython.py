"""CPython's own tests of what uses sockets, as the system packages them (libpython3.…-testsuite)."""

import re
from xml.etree import ElementTree

from apps.transports import Failed, call

from .suite import Suite
from .ways import run

PYTHON = "/usr/bin/python3"

MODULES = [
    "test_socket",
    "test_ssl",
    "test_imaplib",
    "test_subprocess",
    "test_ftplib",
    "test_xmlrpc",
    "test_httplib",
    "test_selectors",
    "test_epoll",
    "test_poll",
    "test_select",
    "test_urllib2_localnet",
    "test_socketserver",
    "test_asyncio.test_events",
    "test_asyncio.test_sendfile",
    "test_asyncio.test_sock_lowlevel",
    "test_asyncio.test_ssl",
    "test_asyncio.test_sslproto",
    "test_asyncio.test_streams",
    "test_asyncio.test_server",
    "test_asyncio.test_buffered_proto",
    "test_asyncio.test_unix_events",
    "test_asyncio.test_subprocess",
    "test_asyncio.test_selector_events",
    "test_asyncio.test_base_events",
    "test_multiprocessing_spawn",
    "test_multiprocessing_fork",
    "test_multiprocessing_forkserver",
]

QUICK = [
    "test_httplib",
    "test_xmlrpc",
    "test_urllib2_localnet",
    "test_socketserver",
    "test_ssl",
    "test_asyncio.test_events",
    "test_asyncio.test_ssl",
    "test_asyncio.test_streams",
    "test_asyncio.test_sendfile",
    "test_asyncio.test_sock_lowlevel",
]

SINCE = {"test_asyncio.test_ssl": (3, 11)}
"""Modules that an older Python does not have."""

LEFT_OUT = ["*VSOCK*"]
"""Waits for a host that answers, where there is a device without one."""

# The resource is all that keeps this one from running: it uses the loopback device.
LOCAL = {"test_socketserver": "network"}

SILENCE = 60
"""Seconds until a test counts as hung."""

LOST = 8
"""Tests of one part that may hang or die, before the rest is given up."""

STARTED = re.compile(rb"^(\w+) \((test\.[\w.]+)\)", re.MULTILINE)


class CPython(Suite):
    name = "cpython"
    at_a_time = 2

    def version(self):
        return "CPython " + call([PYTHON, "-c", "import platform; print(platform.python_version())"]).strip()

    def parts(self):
        version = tuple(map(int, call([PYTHON, "-c", "import sys; print(*sys.version_info[:2])"]).split()))
        return [[module for module in modules if version >= SINCE.get(module, version)] for modules in (MODULES, QUICK)]

    def run(self, part, way, folder, only=None):
        outcomes = {}
        while len(outcomes) < LOST:
            done = self.run_without(part, way, folder, only, outcomes)
            if done is not None:
                return outcomes | done
        raise Failed(f"{part}: {len(outcomes)} tests hang or die: {folder}")

    def run_without(self, part, way, folder, only, lost):
        """Outcomes of all but `lost`; or None, and a test more in `lost`, if the run did not come to its end."""
        log, results = folder / f"log{len(lost)}", folder / f"results{len(lost)}.xml"
        command = [PYTHON, "-m", "test", "-v", "--tempdir", folder, "--junit-xml", results]
        command += ["-u", "all,-network,-urlfetch,-largefile,-gui" + (f",{LOCAL[part]}" if part in LOCAL else "")]
        for pattern in [*LEFT_OUT, *lost]:
            command += ["-i", pattern]
        for test in only or ():
            command += ["-m", test]
        status = run(way, [*command, part], log, SILENCE)
        if results.exists():
            return {
                case.get("name"): outcome(case)
                for case in ElementTree.parse(results).iter("testcase")
                if case.get("name")
            }
        text = log.read_bytes()
        started = STARTED.findall(text)
        if not started:
            raise Failed(f"{part} ran no test: exit status {status}: {log}")
        name, place = (word.decode() for word in started[-1])
        lost[place if place.endswith(f".{name}") else f"{place}.{name}"] = "hung" if status is None else f"died ({status})"
        return None


def outcome(case):
    for kind in ("error", "failure", "skipped"):
        if case.find(kind) is not None:
            return kind
    return "unexpected success" if case.find("outcome") is not None else "passed"
