"""Baseline files of instruction counts: what `kernelbench check --instructions` holds kernels against.

The same file format as that of ratios (`bench/baseline.py`), with a part for each compiler, code level and C library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.autotune.place import Place
from gristmill.bench import baseline, counts
from gristmill.bench.compare import GAP, WRONG
from gristmill.bench.problems import named
from gristmill.bench.statistics.verdict import FASTER, SAME, SLOWER
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

Work = tuple[Op, Kernel, Problem]


@dataclass(frozen=True)
class Entry:
    """One line of a baseline: what `kernel` executes for `problem`."""

    op: str
    problem: str
    kernel: str
    instructions: int


@dataclass(frozen=True)
class Counted:
    """A line held against now. change: present count over the stored one."""

    entry: Entry
    verdict: str
    reason: str = ""
    change: float | None = None
    instructions: int | None = None

    relation = ""

    @property
    def now(self) -> str:
        """What was counted just now, with its unit."""
        return "" if self.instructions is None else f"{self.instructions:,} instructions"

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON."""
        return {
            "op": self.entry.op,
            "problem": self.entry.problem,
            "kernel": self.entry.kernel,
            "verdict": self.verdict,
            "change": self.change,
            "instructions": self.instructions,
            "baseline_instructions": self.entry.instructions,
            "reason": self.reason,
        }


def work(entries: Sequence[Entry]) -> list[Work]:
    """What has to be counted for `entries`: for those that are not `gone`, in their order."""
    found = []
    missing = baseline.gone(entries)
    for entry in entries:
        if entry in missing:
            continue
        op = default_registry().op(entry.op)
        found.append((op, named(op, entry.kernel)[0], op.problem(entry.problem)))
    return found


def measure(items: Sequence[Work], here: Place) -> list[tuple[str, int | None]]:
    """For each, what is wrong with its result or "", and its instructions; of a wrong one none are counted."""
    recorded = [counts.record(op, kernel, problem, here) for op, kernel, problem in items]
    right = [one for one in recorded if not one.wrong]
    found = iter(counts.replayed([one.calls for one in right]) if right else [])
    return [(one.wrong, None if one.wrong else next(found)) for one in recorded]


def find(path: Path, here: Place) -> tuple[list[Entry] | None, str]:
    """The lines for this environment, or None and what differs: from the nearest part, or what is missing to count at all."""
    if gap := counts.missing(here):
        return None, gap
    mine, differs = counts.environment(here), "the file holds no part"
    for part in baseline.read(path, Entry):
        off = [
            f"{name} is {mine.get(name)}, the baseline's is {value}"
            for name, value in part["environment"].items()
            if mine.get(name) != value
        ]
        if not off:
            return part["entries"], ""
        differs = "; ".join(off)
    return None, differs


def update(
    path: Path, here: Place, items: Sequence[Work], found: Sequence[tuple[str, int | None]]
) -> list[Entry]:
    """Put counts into the part for this environment; other parts, and other lines of it but for those that are `gone`, stay."""
    own = counts.environment(here)
    parts = baseline.read(path, Entry) if path.exists() else []
    part = next((p for p in parts if p["environment"] == own), None)
    if part is None:
        part = {"environment": own, "entries": []}
        parts.append(part)
    written = [
        Entry(op.name, str(problem), kernel.name, number)
        for (op, kernel, problem), (_, number) in zip(items, found, strict=True)
        if number is not None
    ]
    missing = baseline.gone(part["entries"])
    kept = {(e.op, e.problem, e.kernel): e for e in [*part["entries"], *written] if e not in missing}
    part["entries"] = [kept[key] for key in sorted(kept)]
    baseline.write(path, parts)
    return written


def against(
    entries: Sequence[Entry], found: Sequence[tuple[str, int | None]], min_effect: float
) -> list[Counted]:
    """Hold counts of the `work` of `entries` against them. A count is exact, so that more than the minimum effect is a verdict."""
    missing = baseline.gone(entries)
    checked = [Counted(entry, GAP, why) for entry, why in missing.items()]
    for entry, (wrong, number) in zip((e for e in entries if e not in missing), found, strict=True):
        if number is None:
            checked.append(Counted(entry, WRONG, wrong))
            continue
        change = number / entry.instructions
        verdict = SLOWER if change > 1 + min_effect else FASTER if change < 1 - min_effect else SAME
        checked.append(Counted(entry, verdict, "", change, number))
    return checked


def exit_code(checked: Sequence[Counted]) -> int:
    """The worst that was found."""
    verdicts = {one.verdict for one in checked}
    if WRONG in verdicts:
        return baseline.BAD
    return baseline.SLOW if SLOWER in verdicts else baseline.ELSEWHERE if GAP in verdicts else baseline.OK
