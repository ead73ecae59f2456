"""Runs unittest modules in a process of their own: `unittests.py RESULTS MODULE... [-- TEST...]`.

Each outcome is a line `test TAB outcome` of the file RESULTS as soon as it is known; a test that did not end has
`started` alone. The loggers that QUIET_LOGGERS names say nothing.
"""

import logging
import os
import sys
import unittest


class Result(unittest.TextTestResult):
    def note(self, test, outcome):
        print(test.id(), outcome, sep="\t", file=self.notes, flush=True)

    def startTest(self, test):
        super().startTest(test)
        self.note(test, "started")

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note(test, "passed")

    def addError(self, test, error):
        super().addError(test, error)
        self.note(test, "error")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.note(test, "failure")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "skipped")

    def addExpectedFailure(self, test, error):
        super().addExpectedFailure(test, error)
        self.note(test, "expected failure")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.note(test, "unexpected success")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.note(subtest, "failure")


def main(results, *names):
    for name in os.environ.get("QUIET_LOGGERS", "").split():
        logging.getLogger(name).setLevel(logging.CRITICAL)
    modules, _, only = " ".join(names).partition(" -- ")
    with open(results, "w") as Result.notes:
        suite = unittest.defaultTestLoader.loadTestsFromNames((only or modules).split())
        unittest.TextTestRunner(verbosity=2, resultclass=Result).run(suite)


if __name__ == "__main__":
    main(*sys.argv[1:])
