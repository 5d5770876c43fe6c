"""CPU seconds of each test, its processes' included: what a machine with much to do at the same time does not change.

At the end of a run: all in all, and the dearest files and tests. Tests wait for one another and for other programs, so that
their seconds by the clock say little about which to make cheaper; these do. ONECARD_CPU_LOG=FILE has a line for each test:
its seconds in setup, in the test and in teardown, and its name.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

NAME = "cpu seconds"
SHOWN = 20  # files, and tests
LOG = os.environ.get("ONECARD_CPU_LOG")
TICKS = os.sysconf("SC_CLK_TCK")

_begun = 0.0
_by_test: Counter[str] = Counter()
_phases: dict[str, list[float]] = {}
_workers: list[float] = []  # all that each has spent


def spent() -> float:
    """Of this process, of those that it has waited for, and of the ranks, whose parent is the server that forks them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + _server()


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _server() -> float:
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no rank has been started, or another system
        return 0.0
    return sum(int(ticks) for ticks in after_name[11:15]) / TICKS  # utime, stime, and both of its ended children


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    global _begun
    _begun = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    global _begun
    report = yield
    now = spent()
    report.user_properties.append((NAME, now - _begun))
    _begun = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # With workers: only the process that shows the results keeps them for a summary.
    seconds = dict(report.user_properties).get(NAME, 0.0)
    _by_test[report.nodeid] += seconds
    _phases.setdefault(report.nodeid, []).append(seconds)
    if report.when == "teardown":
        _log(*_phases.pop(report.nodeid), report.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _workers.append(getattr(node, "workeroutput", {}).get(NAME, 0.0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[NAME] = spent()


def _log(*row: object) -> None:
    if LOG and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(LOG, "a") as file:
            print(*[f"{each:.2f}" if isinstance(each, float) else each for each in row], file=file)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(_by_test) < 2:
        return
    by_file: Counter[str] = Counter()
    for test, seconds in _by_test.items():
        by_file[test.partition("::")[0]] += seconds
    total = sum(_by_test.values())
    beside = _own() + sum(_workers) - total if _workers else spent() - total  # collection, imports, and the like
    terminalreporter.section(
        f"{NAME}: {total:.0f} in {len(_by_test)} tests of {len(by_file)} files, {beside:.0f} beside them"
    )
    for counted in (by_file, _by_test):
        for name, seconds in counted.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} {name}")
        terminalreporter.write_line("")
