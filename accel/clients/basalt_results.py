"""A plugin of pytest: what became of each test, in the file that BASALT_RESULTS names.

A line says `begun ID` before a test and `passed ID`, `failed ID`, `skipped ID`, `xfailed ID` or `xpassed ID` after it, and is written
at once: of a process that dies it is known in which test. It is loaded by `-p basalt_results`, and tests do not see it.
"""

import os

_RESULTS = open(os.environ["BASALT_RESULTS"], "w", encoding="utf-8", buffering=1)


def _say(outcome, test):
    _RESULTS.write(f"{outcome} {test}\n")


def pytest_collectreport(report):
    if report.outcome != "passed":
        _say(report.outcome, report.nodeid)


def pytest_runtest_logstart(nodeid, location):
    _say("begun", nodeid)


def pytest_runtest_logreport(report):
    # A test that passed has two more reports, of what is before and after it.
    if report.when != "call" and report.outcome == "passed":
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xpassed" if outcome == "passed" else "xfailed"
    _say(outcome, report.nodeid)
