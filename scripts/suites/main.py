"""scripts/test-suites: other people's test suites, natively and under the library, compared by test id."""

import argparse
import signal
import sys
from pathlib import Path

from apps import script
from apps.series import tell
from apps.transports import Failed

from .cpython import CPython
from .curl import Curl
from .libuv import LibUv
from .postgres import Postgres
from .redis import Redis
from .suite import compare
from .tokio import Tokio
from .pypi import Gevent, Tornado

SUITES = {suite.name: suite for suite in (CPython(), Curl(), LibUv(), Redis(), Postgres(), Tornado(), Gevent(), Tokio())}


def parse():
    parser = script.parser("test-suites", __doc__)
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder, in which logs and results stay")
    parser.add_argument("--list", action="store_true", help="list suites and their parts")
    parser.add_argument("--quick", action="store_true", help="only parts that take seconds")
    parser.add_argument("--only", default="", metavar="REGEX", help="only parts that the regular expression finds")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all, if none is given")
    arguments = parser.parse_args()
    for name in arguments.suites:
        if name not in SUITES:
            parser.error(f"no suite {name}; there are: {', '.join(SUITES)}")
    return arguments


def test(arguments, folder):
    chosen = []
    for suite in (SUITES[name] for name in arguments.suites or SUITES):
        parts = suite.chosen(arguments.quick, arguments.only)
        if parts:
            chosen.append((suite, parts))
    if not chosen:
        raise Failed("no suite has such a part")
    if arguments.list:
        for suite, parts in chosen:
            print(f"{suite.name}: {' '.join(parts)}")
        return 0
    failed = []
    for suite, parts in chosen:
        suite.prepare(arguments.cache)
        tell(f"\n== {suite.version()}")
        place = (arguments.keep or folder) / suite.name
        place.mkdir(parents=True)
        if not report(compare(suite, parts, arguments.release, place)):
            failed.append(suite.name)
    if failed:
        raise Failed(f"differences, or no tests, or nothing left TCP: {', '.join(failed)}")
    return 0


def report(compared):
    """Whether all is well."""
    kinds = {"differs": compared.differences, "differs natively, too": compared.unsteady}
    for title, tests in kinds.items():
        for test, (native, library) in tests.items():
            print(f"{title}: {test}: {native or 'not run'} natively, {library or 'not run'} under the library")
    print(f"{compared.suite.version()}: {compared.tests} tests, {len(compared.differences)} differences")
    print(f"ends of connections in {compared.counts.processes} processes: {compared.counts.describe()}")
    return compared.tests > 0 and not compared.differences and bool(compared.counts.upgraded)


if __name__ == "__main__":
    # A shell without job control has it ignored in the background, and tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(script.run("test-suites", test, parse()))
