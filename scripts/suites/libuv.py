"""libuv's own tests, built from Debian's source package."""

import re

from apps.transports import Failed, call

from .source import Source
from .suite import Suite
from .ways import run

SILENCE = 200
"""Seconds; the runner itself ends a test that hangs, after 5 to 100."""

RESULT = re.compile(r"^(ok|not ok) \d+ - (\S+)(.*)$", re.MULTILINE)


class LibUv(Suite):
    name = "libuv"

    def prepare(self, cache):
        self.source = Source("libuv1", cache, build)

    def version(self):
        return f"libuv {self.source.version}"

    def parts(self):
        return ["run-tests"], []

    def run(self, part, way, folder, only=None):
        settings = {"UV_RUN_AS_ROOT": "1", "LD_LIBRARY_PATH": str(self.source.folder / ".libs")}
        outcomes = {}
        for number, test in enumerate(sorted(only) if only else [""]):
            log = folder / f"log{number}"
            command = [self.source.folder / "test/.libs/run-tests", *([test] if test else [])]
            status = run(way, command, log, SILENCE, settings, self.source.folder)
            if test:
                outcomes[test] = "passed" if status == 0 else "skipped" if status == 7 else "failed"
                continue
            for result, name, rest in RESULT.findall(log.read_text(errors="replace")):
                outcomes[name] = "skipped" if "# SKIP" in rest else "passed" if result == "ok" else "failed"
            if not outcomes:
                raise Failed(f"no test ran: exit status {status}: {log}")
        return outcomes


def build(folder):
    call(["sh", "autogen.sh"], folder=folder)
    call(["./configure", "--quiet", "--disable-static"], folder=folder)
    call(["make", "--silent", "-j2", "libuv.la", "test/run-tests"], folder=folder, timeout=600)
