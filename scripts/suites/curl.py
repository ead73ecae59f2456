"""curl's own tests, built from Debian's source package without a shared library: many set LD_PRELOAD if there is one."""

import getpass
import re
import shutil

from apps.transports import Failed, call

from .source import Source
from .suite import Suite
from .ways import run

PARTS = {
    "http": ("http", "https", "http-ipv6", "http-proxy", "http-unix", "httptls+srp", "socks4", "socks5"),
    "ftp": ("ftp", "ftps", "ftp-ipv6"),
    "mail": ("smtp", "imap", "pop3"),
}
"""By the first server that a test asks for."""

REST = "rest"

SILENCE = 90
"""Seconds until a test counts as hung."""

LOST = 8
"""Tests of one part that may hang, before the rest is given up."""

# Packages of other libraries, which would have to be installed.
UNDONE = ("99_nss.patch", "90_gnutls.patch")

SERVER_SCRIPT = "tests/ftpserver.pl"
WAITS_FOR_NOTHING = "pidwait($datapid, 0);"
WAITS = "pidwait($slavepid, 0);"
"""It waits for a process that is not its child but the shell's, so not at all. A data connection's process that ends late removes
the file by which its successor is known, which is then not told to close its connection."""

SERVER = re.compile(r"<server>\s*(\S+)")
# What shells say of killed servers may come in between.
RESULT = re.compile(r"^test (\d{4})\.\.\.", re.MULTILINE)
ENDED = "TESTDONE: "
PASSED = re.compile(r"\bOK \(\d+ +out of ")


class Curl(Suite):
    name = "curl"

    def prepare(self, cache):
        self.source = Source("curl", cache, build)
        self.tests = {}
        for path in (self.source.folder / "tests/data").glob("test[0-9]*"):
            server = SERVER.search(path.read_text(errors="replace"))
            name = server.group(1) if server else ""
            part = next((part for part, servers in PARTS.items() if name in servers), REST)
            self.tests.setdefault(part, []).append(int(path.name.removeprefix("test")))

    def version(self):
        return f"curl {self.source.version}"

    def parts(self):
        return [*PARTS, REST], []

    def run(self, part, way, folder, only=None):
        left = sorted(map(int, only)) if only else sorted(self.tests[part])
        # Not all that are skipped are named.
        outcomes = {str(test): "skipped" for test in left}
        for number in range(LOST):
            log = folder / f"log{number}"
            command = ["perl", "-I.", "./runtests.pl", "-a", "-n", "-p", *left]
            # It needs the one; some tests of names need the other.
            settings = {"USER": getpass.getuser(), "LC_ALL": "C.UTF-8"}
            status = run(way, command, log, SILENCE, settings, self.source.folder / "tests")
            text = log.read_text(errors="replace")
            _, *found = RESULT.split(text)
            seen = dict(zip(map(int, found[::2]), found[1::2], strict=True))
            outcomes |= {str(test): outcome(text) for test, text in seen.items()}
            if status is not None:
                if ENDED not in text:
                    raise Failed(f"{part} did not come to its end: exit status {status}: {log}")
                return outcomes
            if not seen:
                break
            shutil.copytree(self.source.folder / "tests/log", folder / f"servers{number}")
            outcomes[str(max(seen))] = "hung"
            left = [test for test in left if test > max(seen)]
            if not left:
                return outcomes
        raise Failed(f"{part}: too many tests hang: {folder}")


def outcome(text):
    return "passed" if PASSED.search(text) else "failed"


def build(folder):
    for patch in UNDONE:
        call(["patch", "--quiet", "-R", "-p1", "-i", f"debian/patches/{patch}"], folder=folder)
    server = folder / SERVER_SCRIPT
    text = server.read_text()
    if text.count(WAITS_FOR_NOTHING) != 1:
        raise Failed(f"{server} is another one")
    server.write_text(text.replace(WAITS_FOR_NOTHING, WAITS))
    options = ["--disable-shared", "--disable-dependency-tracking", "--enable-debug", "--disable-manual", "--with-openssl"]
    call(["./configure", "--quiet", *options], folder=folder, timeout=600)
    # Some of Debian's patches are not in the style that a build with debugging insists on.
    command = ["make", "--silent", "-j2", "CHECKSRC=@true ||"]
    call(command, folder=folder, timeout=1200)
    call([*command, "-C", "tests"], folder=folder, timeout=1200)
