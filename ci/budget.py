"""The time budgets of building and testing: a table in CONTRIBUTING.md, and a suite that exceeds its row fails.

    python ci/budget.py                         compare the last native build with its row
    pytest -p ci.budget ...                     compare the suites (folders of tests/) with theirs

Suites are counted in CPU seconds, children included, so that a busy machine does not fail them; the build in the
seconds of its compiler jobs, which is twice the time of a build with two jobs. A second is one of a processor that
does `work` in `REFERENCE`: a fixed amount of work is timed all through the run, and after a build, where what a busy
machine adds counts, too. Slower processors have proportionally more seconds.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BUILD = "native build"
REFERENCE = 0.0040
"""Seconds of `work` on the processor of the table: an AMD EPYC 9005 whose other cores are busy."""
PERIOD = 400
"""Tests between two timings of `work`."""

_spent: defaultdict[str, float] = defaultdict(float)
_times: list[float] = []
_tests = count()
_begin: float | None = None
"""CPU seconds as the first of a row of tests of one suite began."""


def work() -> int:
    """What most tests do, in little: objects, dictionaries, strings and calls of Python."""
    rows = {str(number): [number, number + 1] for number in range(4000)}
    return sum(len(name) + row[1] for name, row in sorted(rows.items()))


def timed_work() -> float:
    """CPU seconds of `work`: the least of five, since the first ones fill caches."""
    times = []
    for _ in range(5):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def time_while_busy() -> float:
    """Seconds of `work` with what other processes take meanwhile, as compiler jobs have them: the mean over a second or so."""
    begin, count = time.perf_counter(), 0
    while count < 200 or time.perf_counter() - begin < 1.0:
        work()
        count += 1
    return (time.perf_counter() - begin) / count


def pace(times: list[float]) -> float:
    """How many seconds of this machine are one of the reference; 1 if it is faster, or if nothing was timed."""
    return max(1.0, statistics.median(times) / REFERENCE) if times else 1.0


def budgets(page: str) -> dict[str, int]:
    """Seconds by suite: the rows ``| name | seconds | ...`` of the table whose head begins with "suite"."""
    table = re.search(r"^\| suite \|.*\n\|[-|: ]+\|\n((?:\|.*\n)+)", page, re.M)
    if table is None:
        raise ValueError("CONTRIBUTING.md has no table of budgets: a head that begins with '| suite |'")
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table[1].splitlines()]
    return {row[0]: int(row[1]) for row in rows}


def overruns(spent: Mapping[str, float], allowed: dict[str, int]) -> list[str]:
    """A line for each suite that took longer than its budget, or that has none."""
    lines = []
    for suite, seconds in sorted(spent.items()):
        if suite not in allowed:
            lines.append(f"{suite} took {seconds:.0f} s and has no row in CONTRIBUTING.md's table of budgets")
        elif seconds > allowed[suite]:
            lines.append(f"{suite} took {seconds:.0f} s; its budget is {allowed[suite]} s")
    return lines


def build_seconds(log: str) -> float:
    """Seconds of all jobs of a build, by the text of its ``.ninja_log``: the latest run of each command."""
    jobs: dict[str, float] = {}
    for line in log.splitlines():
        if not line.startswith("#"):
            begin, end, _, output, command = line.split("\t")
            jobs[command] = (int(end) - int(begin)) / 1000
    return sum(jobs.values())


def cpu_seconds() -> float:
    """CPU seconds of this process and its children, both those that have ended and those that wait for the next test."""
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children()))


def _children() -> list[str]:
    """The ids of the running children of this process; none if the kernel does not list them."""
    try:
        tasks = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:
        return []
    return " ".join(tasks).split()


def _seconds_of(pid: str) -> float:
    """CPU seconds of a process and its own children that have ended; 0 if it has ended itself."""
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def suite_of(item: pytest.Item) -> str:
    """The folder of tests/ that a test is in; "tests" for those beside the folders."""
    parts = item.path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    global _begin
    if next(_tests) % PERIOD == 0:
        _times.append(timed_work())
    if _begin is None:
        _begin = cpu_seconds()
    try:
        return (yield)
    finally:
        # Per test, this would take half a millisecond: seconds of threads and children come from many files.
        if nextitem is None or suite_of(nextitem) != suite_of(item):
            _spent[suite_of(item)] += cpu_seconds() - _begin
            _begin = None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the seconds that a worker of pytest-xdist counted."""
    output = getattr(node, "workeroutput", {})
    for suite, seconds in output.get("cpu_seconds", {}).items():
        _spent[suite] += seconds
    _times.extend(output.get("times_of_work", ()))


def _in_reference_seconds() -> dict[str, float]:
    slower = pace(_times)
    return {suite: seconds / slower for suite, seconds in _spent.items()}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cpu_seconds"] = dict(_spent)
        output["times_of_work"] = _times
    elif (
        overruns(_in_reference_seconds(), budgets(PAGE.read_text(encoding="utf-8")))
        and session.exitstatus == 0
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    allowed = budgets(PAGE.read_text(encoding="utf-8"))
    spent = _in_reference_seconds()
    terminalreporter.section(
        f"CPU seconds by suite ({pace(_times):.2f} of this machine are one of the reference)"
    )
    for suite, seconds in sorted(spent.items()):
        terminalreporter.line(f"{seconds:6.0f} of {allowed.get(suite, 0):4} s  {suite}")
    for line in overruns(spent, allowed):
        terminalreporter.line(f"over budget: {line}", red=True)


def main() -> int:
    """Compare the last native build with its budget; 1 if it took longer."""
    seconds = build_seconds((ROOT / "build" / ".ninja_log").read_text(encoding="utf-8"))
    allowed, lines = budgets(PAGE.read_text(encoding="utf-8")), []
    if overruns({BUILD: seconds}, allowed):
        seconds /= pace([time_while_busy()])
        lines = overruns({BUILD: seconds}, allowed)
    print("\n".join(lines) or f"native build: {seconds:.0f} s of compiler jobs")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
