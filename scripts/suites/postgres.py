"""PostgreSQL's regression and isolation tests over TCP, from Debian's source package, of Debian's server."""

import os
import pwd
import re
import shutil

from apps.postgres import binaries
from apps.servers import free_port
from apps.transports import Failed, call

from .source import Source
from .suite import Suite
from .ways import run

ACCOUNT = "postgres"

SCHEDULES = {"regress": "parallel_schedule", "isolation": "isolation_schedule"}

DRIVERS = {"regress": "regress/pg_regress", "isolation": "isolation/pg_isolation_regress"}

EXTENSIONS = ("refint.so", "autoinc.so")
"""Of contrib/spi, which tests load."""

SILENCE = 180

RESULT = re.compile(r"^(?:test| {4}) +(\S+) +\.\.\. (ok|FAILED|failed \(ignored\))", re.MULTILINE)


class Postgres(Suite):
    name = "postgres"

    def prepare(self, cache):
        self.binaries = binaries()
        self.source = Source(f"postgresql-{self.binaries.parent.name}", cache, build)

    def version(self):
        return f"PostgreSQL {self.source.version}"

    def parts(self):
        return list(SCHEDULES), []

    def run(self, part, way, folder, only=None):
        # Tests need those before them, so all of a schedule run. Root must not start a server.
        source = self.source.folder / "src/test" / part
        libraries = self.binaries.parent / "lib"
        place = folder / "run"
        shutil.copytree(source, place)
        if part == "regress":
            for name in EXTENSIONS:
                shutil.copy(libraries / name, place)
        drop = []
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT)
            for path in (place, *place.rglob("*")):
                os.chown(path, account.pw_uid, account.pw_gid)
            drop = ["setpriv", "--reuid", ACCOUNT, "--regid", ACCOUNT, "--init-groups"]
        log = folder / "log"
        options = [f"--bindir={self.binaries}", f"--dlpath={place}", f"--temp-instance={place / 'instance'}"]
        options += ["--host=127.0.0.1", f"--port={free_port()}", f"--schedule={SCHEDULES[part]}", "--no-locale"]
        options += ["--max-connections=6"] if part == "regress" else []
        driver = libraries / "pgxs/src/test" / DRIVERS[part]
        status = run(way, [*drop, driver, *options], log, SILENCE, folder=place)
        outcomes = dict(RESULT.findall(log.read_text(errors="replace")))
        if not outcomes:
            raise Failed(f"{part} ran no test: exit status {status}: {log}")
        outcomes["(the run)"] = f"exit status {status}"
        return outcomes


def build(folder):
    """The functions in C that tests call."""
    call(["./configure", "--quiet", "--without-readline", "--without-zlib"], folder=folder)
    call(["make", "--silent", "-C", "src/backend", "generated-headers"], folder=folder)
    place = folder / "src/test/regress"
    call(["gcc", "-shared", "-fPIC", "-O1", f"-I{folder / 'src/include'}", "-o", place / "regress.so", place / "regress.c"])
