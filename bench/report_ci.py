"""The outcome of `kernelbench check` as JUnit XML and, for pull requests, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from gristmill.bench.baseline import Checked
from gristmill.bench.compare import GAP, WRONG
from gristmill.bench.count_baseline import Counted
from gristmill.bench.statistics.verdict import SLOWER, UNCLEAR


def junit(checked: Sequence[Checked | Counted], seconds: float) -> str:
    """One test case per line: SLOWER and WRONG are failures; kernels without a verdict are skipped, with the reason."""
    suite = ElementTree.Element(
        "testsuite",
        name="kernelbench check",
        tests=str(len(checked)),
        time=f"{seconds:.3f}",
        failures=str(sum(row.verdict in (SLOWER, WRONG) for row in checked)),
        errors="0",
        skipped=str(sum(row.verdict in (UNCLEAR, GAP) for row in checked)),
    )
    for row in checked:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"kernelbench.{row.entry.op}",
            name=f"{row.entry.kernel}[{row.entry.problem}]",
        )
        if row.verdict in (SLOWER, WRONG):
            ElementTree.SubElement(case, "failure", type=row.verdict, message=describe(row))
        elif row.verdict in (UNCLEAR, GAP):
            ElementTree.SubElement(case, "skipped", message=describe(row))
    return _xml(suite)


def markdown(checked: Sequence[Checked | Counted], title: str) -> str:
    """A table, worst first."""
    order = (WRONG, SLOWER, UNCLEAR, GAP)
    rows = sorted(
        checked,
        key=lambda row: (order.index(row.verdict) if row.verdict in order else len(order), row.entry.kernel),
    )
    lines = [
        f"### {title}",
        "",
        "| verdict | kernel | problem | change | now | why |",
        "|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        change = "" if row.change is None else f"{row.change - 1:+.1%}"
        reason = row.reason.replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| {row.verdict} | {row.entry.kernel} | `{row.entry.problem}` | {change} | {row.now} | {reason} |"
        )
    return "\n".join(lines) + "\n"


def stopped(why: str) -> str:
    """The JUnit XML of a check that could not start: one error, so that CI has something to show."""
    suite = ElementTree.Element(
        "testsuite", name="kernelbench check", tests="1", time="0.000", failures="0", errors="1", skipped="0"
    )
    case = ElementTree.SubElement(suite, "testcase", classname="kernelbench", name="baseline")
    ElementTree.SubElement(case, "error", message=why)
    return _xml(suite)


def _xml(suite: ElementTree.Element) -> str:
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def describe(row: Checked | Counted) -> str:
    """A line on one result."""
    if row.change is None:
        return f"{row.verdict}: {row.reason}"
    text = f"{row.verdict}: {row.change - 1:+.1%} against the baseline{row.relation}"
    return text + (f"; {row.reason}" if row.reason else "")
