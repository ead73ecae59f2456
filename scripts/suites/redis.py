"""Redis' own tests in Tcl, from Debian's source package, of Debian's redis-server."""

import random
import re
import shutil
import tempfile
from pathlib import Path

from apps.transports import Failed

from .source import Source
from .suite import Suite
from .ways import run

PROGRAMS = Path("/usr/bin")

UNITS = """
    unit/dump unit/auth unit/protocol unit/keyspace unit/scan unit/info unit/info-command unit/type/string
    unit/type/incr unit/type/list unit/type/set unit/type/zset unit/type/hash unit/type/stream
    unit/type/stream-cgroups unit/sort unit/expire unit/other unit/multi unit/quit unit/acl unit/acl-v2
    unit/latency-monitor unit/pubsub unit/pubsubshard unit/slowlog unit/scripting unit/functions unit/introspection
    unit/introspection-2 unit/limits unit/obuf-limits unit/bitops unit/bitfield unit/geo unit/hyperloglog
    unit/lazyfree unit/wait unit/pause unit/querybuf unit/pendingquerybuf unit/tracking unit/shutdown
    unit/networking unit/cluster unit/client-eviction unit/replybufsize unit/maxmemory unit/aofrw
    integration/block-repl integration/replication integration/replication-2 integration/replication-3
    integration/replication-4 integration/replication-psync integration/replication-buffer integration/shutdown
    integration/redis-cli integration/redis-benchmark integration/logging integration/failover integration/psync2
    integration/psync2-reg integration/psync2-pingoff integration/psync2-master-restart integration/aof
    integration/rdb
""".split()

QUICK = ["unit/auth", "unit/protocol", "unit/multi", "unit/quit", "unit/networking", "unit/type/incr", "unit/type/hash"]

SILENCE = 120

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RESULT = re.compile(r"^\[(ok|err|exception|skip|ignore|timeout)\]: (.*)$", re.MULTILINE)
TOOK = re.compile(r" \(\d+ ms\)$| in tests/\S+$")
RANDOM = re.compile(r"#\d+|(?<=x = )\d+")


CONFIGURATIONS = {
    # It writes as fast as it can while replicas are away for a second, and counts how often what they have missed no longer fits
    # into the backlog. A megabyte holds a second's writes over TCP; they come some times as fast under the library.
    "integration/psync2": ["--config", "repl-backlog-size", "16mb"],
}
"""What a part's servers are configured with beyond their own, natively as well."""


class Redis(Suite):
    name = "redis"

    def prepare(self, cache):
        self.source = Source("redis", cache, link)

    def version(self):
        return f"Redis {self.source.version}"

    def parts(self):
        return UNITS, QUICK

    def run(self, part, way, folder, only=None):
        log = folder / "log"
        command = ["tclsh", "tests/test_helper.tcl", "--clients", "1", "--durable", "--single", part]
        command += CONFIGURATIONS.get(part, [])
        # It takes up to 8,000 ports from here on, below those that the kernel hands to clients.
        command += ["--baseport", random.randrange(12000, 22000)]
        # In a folder of its own, from which no other run removes anything, and whose name is short enough for those of
        # Unix sockets.
        with tempfile.TemporaryDirectory(prefix="redis.") as place:
            tests = Path(place) / "tests"
            shutil.copytree(self.source.folder / "tests", tests, ignore=shutil.ignore_patterns("tmp"))
            (tests / "tmp").mkdir()
            (tests.parent / "src").symlink_to(self.source.folder / "src")
            # Their names may be used several times, so all of a unit runs.
            status = run(way, command, log, SILENCE, {"TERM": "dumb"}, place)
        outcomes = {}
        for result, name in RESULT.findall(COLOUR.sub("", log.read_text(errors="replace"))):
            name = RANDOM.sub("…", TOOK.sub("", name))
            # Some tests are made in loops, as often as it takes.
            outcomes[name] = " ".join(sorted({*outcomes.get(name, "").split(), result}))
        outcomes["(the run)"] = f"exit status {status}"
        if len(outcomes) == 1:
            raise Failed(f"{part} ran no test: {log}")
        return outcomes


def link(folder):
    """The tests look for the programs where make would put them."""
    for path in PROGRAMS.glob("redis-*"):
        (folder / "src" / path.name).symlink_to(path)
