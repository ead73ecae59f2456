"""What a suite has to offer, and the comparison of its two runs."""

import re
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from apps.series import tell

from .ways import RUNS, Native, Preloaded

AGAIN = 4
"""Native runs of a test that differed, to find those that differ from one native run to the next."""


def once(folder, make):
    """`make` fills the new folder, unless that has been done before. What is left of one that did not end is removed."""
    done = folder / "built"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make()
        done.touch()


class Suite:
    """Other people's tests. A part is what one command runs."""

    name = ""
    at_a_time = 1
    """Parts that may run beside each other."""

    def prepare(self, cache):
        """Fetches and builds what is missing in the folder `cache`."""

    def version(self):
        raise NotImplementedError

    def parts(self):
        """The names of all parts, and of those that take seconds and move connections."""
        raise NotImplementedError

    def chosen(self, quick, only):
        every, short = self.parts()
        return [part for part in (short if quick else every) if re.search(only, part)]

    def run(self, part, way, folder, only=None):
        """Outcomes by test id, of those in `only` or of all; in parentheses, what is no test. Logs and results go to
        `folder`."""
        raise NotImplementedError


@dataclass
class Compared:
    suite: Suite
    tests: int = 0
    differences: dict = field(default_factory=dict)
    unsteady: dict = field(default_factory=dict)
    """Tests whose outcome under the library is one that they also had natively."""
    counts: object = None


def compare(suite, parts, release, folder):
    """Both runs of each part, and the native ones of what differs."""
    compared = Compared(suite)
    preloaded = Preloaded(release, folder)

    def both(part):
        outcomes = []
        for way in (Native(), preloaded):
            outcomes.append(suite.run(part, way, inside(folder, f"{part}.{way.name}")))
            tell(f"{suite.name} {part} {way.title}: {summary(outcomes[-1])}")
        return outcomes

    with ThreadPoolExecutor(suite.at_a_time) as pool:
        try:
            results = dict(zip(parts, pool.map(both, parts), strict=True))
        except BaseException:
            RUNS.stop()
            raise
    for part, (native, library) in results.items():
        compared.tests += sum(not test.startswith("(") for test in native)
        differing = {test for test in {*native, *library} if native.get(test) != library.get(test)}
        if not differing:
            continue
        seen = natively_again(suite, part, differing, native, folder)
        for test in sorted(differing):
            had, name = library.get(test), f"{part}: {test}"
            if had in seen[test]:
                where = compared.unsteady
            else:
                where = compared.differences
            where[name] = (native.get(test), had)
    compared.counts = preloaded.counts()
    return compared


def natively_again(suite, part, tests, first, folder):
    """The outcomes that each of `tests` has natively: alone, and once more among all others."""
    seen = defaultdict(set)
    for test in tests:
        seen[test].add(first.get(test))
    for number in range(AGAIN):
        only = tests if number else None
        outcomes = suite.run(part, Native(), inside(folder, f"{part}.again{number}"), only)
        for test in tests:
            seen[test].add(outcomes.get(test))
    return seen


def inside(folder, name):
    path = Path(folder) / name.replace("/", ".")
    path.mkdir(parents=True)
    return path


def summary(outcomes):
    kinds = defaultdict(int)
    for outcome in outcomes.values():
        kinds[outcome] += 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no test"
