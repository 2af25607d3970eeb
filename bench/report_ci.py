"""What `kernelbench check` found, for machines and for a pull request: JUnit XML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from gristmill.bench.baseline import Checked
from gristmill.bench.compare import GAP, WRONG
from gristmill.bench.count_baseline import Counted
from gristmill.bench.statistics.verdict import SLOWER, UNCLEAR


def junit(checked: Sequence[Checked | Counted], seconds: float) -> str:
    """A test case a line: SLOWER and WRONG are failures, what cannot be said or run is skipped, with the reason."""
    suite = ElementTree.Element(
        "testsuite",
        name="kernelbench check",
        tests=str(len(checked)),
        time=f"{seconds:.3f}",
        failures=str(sum(one.verdict in (SLOWER, WRONG) for one in checked)),
        errors="0",
        skipped=str(sum(one.verdict in (UNCLEAR, GAP) for one in checked)),
    )
    for one in checked:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"kernelbench.{one.entry.op}",
            name=f"{one.entry.kernel}[{one.entry.problem}]",
        )
        if one.verdict in (SLOWER, WRONG):
            ElementTree.SubElement(case, "failure", type=one.verdict, message=describe(one))
        elif one.verdict in (UNCLEAR, GAP):
            ElementTree.SubElement(case, "skipped", message=describe(one))
    return _xml(suite)


def markdown(checked: Sequence[Checked | Counted], title: str) -> str:
    """A table, worst first."""
    order = (WRONG, SLOWER, UNCLEAR, GAP)
    rows = sorted(
        checked,
        key=lambda one: (order.index(one.verdict) if one.verdict in order else len(order), one.entry.kernel),
    )
    lines = [
        f"### {title}",
        "",
        "| verdict | kernel | problem | change | now | why |",
        "|---|---|---|---:|---:|---|",
    ]
    for one in rows:
        change = "" if one.change is None else f"{one.change - 1:+.1%}"
        reason = one.reason.replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| {one.verdict} | {one.entry.kernel} | `{one.entry.problem}` | {change} | {one.now} | {reason} |"
        )
    return "\n".join(lines) + "\n"


def stopped(why: str) -> str:
    """The JUnit XML of a check that could not begin: one error, so that a CI that shows such files has one to show."""
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


def describe(one: Checked | Counted) -> str:
    """A line on one result."""
    if one.change is None:
        return f"{one.verdict}: {one.reason}"
    text = f"{one.verdict}: {one.change - 1:+.1%} against the baseline{one.relation}"
    return text + (f"; {one.reason}" if one.reason else "")
