"""Baseline files of instruction counts, for `kernelbench check --instructions`.

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
from gristmill.bench.result_file import attributes
from gristmill.bench.statistics.verdict import FASTER, SAME, SLOWER
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

Work = tuple[Op, Kernel, Problem]


@dataclass(frozen=True)
class Entry:
    """One line of a baseline: the instructions that `kernel` executes for `problem`."""

    op: str
    problem: str
    kernel: str
    instructions: int


@dataclass(frozen=True)
class Counted:
    """A line compared with the present; `change` is the present count over the stored one."""

    entry: Entry
    verdict: str
    reason: str = ""
    change: float | None = None
    instructions: int | None = None

    relation = ""

    @property
    def now(self) -> str:
        """The present count, with its unit."""
        return "" if self.instructions is None else f"{self.instructions:,} instructions"

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON."""
        return {
            **attributes(self.entry, "op", "problem", "kernel"),
            **attributes(self, "verdict", "change", "instructions"),
            "baseline_instructions": self.entry.instructions,
            "reason": self.reason,
        }


def work(entries: Sequence[Entry]) -> list[Work]:
    """The items to count for `entries`, in order, without those that are `gone`."""
    items = []
    missing = baseline.gone(entries)
    for entry in entries:
        if entry in missing:
            continue
        op = default_registry().op(entry.op)
        items.append((op, named(op, entry.kernel)[0], op.problem(entry.problem)))
    return items


def measure(items: Sequence[Work], here: Place) -> list[tuple[str, int | None]]:
    """Per item, what is wrong with its result ("" if nothing) and its instructions, which are not counted if it is wrong."""
    recorded = [counts.record(op, kernel, problem, here) for op, kernel, problem in items]
    correct = [recording for recording in recorded if not recording.wrong]
    instructions = iter(counts.replayed([recording.calls for recording in correct]) if correct else [])
    return [(recording.wrong, None if recording.wrong else next(instructions)) for recording in recorded]


def find(path: Path, here: Place) -> tuple[list[Entry] | None, str]:
    """The lines for this environment; or None and the difference from the nearest part, or what is missing for counting."""
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
    path: Path, here: Place, items: Sequence[Work], measured: Sequence[tuple[str, int | None]]
) -> list[Entry]:
    """Write counts to the part for this environment. Other parts are kept, and other lines of it but those that are `gone`."""
    current = counts.environment(here)
    parts = baseline.read(path, Entry) if path.exists() else []
    part = next((p for p in parts if p["environment"] == current), None)
    if part is None:
        part = {"environment": current, "entries": []}
        parts.append(part)
    written = [
        Entry(op.name, str(problem), kernel.name, number)
        for (op, kernel, problem), (_, number) in zip(items, measured, strict=True)
        if number is not None
    ]
    missing = baseline.gone(part["entries"])
    entries_by_key = {
        (e.op, e.problem, e.kernel): e for e in [*part["entries"], *written] if e not in missing
    }
    part["entries"] = [entries_by_key[key] for key in sorted(entries_by_key)]
    baseline.write(path, parts)
    return written


def against(
    entries: Sequence[Entry], counts: Sequence[tuple[str, int | None]], min_effect: float
) -> list[Counted]:
    """Compare counts of the `work` of `entries` with them. Counts are exact, so every change above the minimum effect is a verdict."""
    missing = baseline.gone(entries)
    checked = [Counted(entry, GAP, why) for entry, why in missing.items()]
    for entry, (wrong, number) in zip((e for e in entries if e not in missing), counts, strict=True):
        if number is None:
            checked.append(Counted(entry, WRONG, wrong))
            continue
        change = number / entry.instructions
        verdict = SLOWER if change > 1 + min_effect else FASTER if change < 1 - min_effect else SAME
        checked.append(Counted(entry, verdict, "", change, number))
    return checked


def exit_code(checked: Sequence[Counted]) -> int:
    """The most severe verdict."""
    verdicts = {row.verdict for row in checked}
    if WRONG in verdicts:
        return baseline.BAD
    return baseline.SLOW if SLOWER in verdicts else baseline.ELSEWHERE if GAP in verdicts else baseline.OK
