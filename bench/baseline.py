"""Baseline files: how long kernels may take, as ratios to another kernel timed in turn with them.

The ratio of two kernels on one problem, timed in the same rounds, hardly depends on the load of the machine, and depends less on the
machine than a time does. A file holds one part per environment.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.autotune.place import Place
from gristmill.bench.compare import GAP, WRONG, Case, Row
from gristmill.bench.problems import named
from gristmill.bench.result_file import ResultError, attributes, parsed, replace
from gristmill.bench.statistics.verdict import SLOWER, UNCLEAR, Rule, judge
from gristmill.kernel_registry.registry import UnknownError, default_registry

SCHEMA = 1
OK, SLOW, BAD, NOISY, ELSEWHERE, ABSENT = 0, 1, 2, 3, 4, 5
"""Exit codes of `kernelbench check`: fine, slower, wrong result, too noisy to say, environment differs, no baseline."""


@dataclass(frozen=True)
class Entry:
    """One line of a baseline: `kernel` took `ratio` times as long as `yardstick`, with the interval that was measured."""

    op: str
    problem: str
    kernel: str
    yardstick: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Checked:
    """A line compared with the present.

    Attributes:
        verdict: the verdict on both ratios.
        change: present ratio over the stored one.
    """

    entry: Entry
    verdict: str
    reason: str
    change: float | None
    row: Row

    @property
    def now(self) -> str:
        """The present measurement, with its unit."""
        return "" if self.row.us is None else f"{self.row.us:.3g} µs"

    @property
    def relation(self) -> str:
        """What the change is relative to, in addition to the baseline."""
        return f", relative to {self.entry.yardstick}"

    def as_dict(self) -> dict[str, Any]:
        """The row of JSON."""
        return {
            **attributes(self.entry, "op", "problem", "kernel", "yardstick"),
            **attributes(self, "verdict", "change"),
            **attributes(self.row.comparison, "ratio"),
            "baseline_ratio": self.entry.ratio,
            **attributes(self.row, "us", "noise", "error"),
            "reason": self.reason,
        }


def environment(here: Place, portable: bool) -> dict[str, Any]:
    """What must be equal for ratios to be comparable; if `portable`, any device of the same target name is."""
    import torch

    version = ".".join(here.build.torch.split("+")[0].split(".")[:2]) if here.build.torch else None
    fields: dict[str, Any] = {
        "target": here.target.name,
        "torch": version,
        "threads": torch.get_num_threads(),
    }
    return fields if portable else fields | {"device": here.target.device, "triton": here.build.triton}


def read(path: Path, kind: type = Entry) -> list[dict[str, Any]]:
    """The parts of a baseline file, with entries of type `kind`. ResultError: the file is invalid; FileNotFoundError: it does not exist."""
    data = parsed(path, "a baseline file")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("parts"), list):
        raise ResultError(
            f"{path}: expected a baseline file of schema {SCHEMA}; kernelbench check --update writes one"
        )
    for place, part in enumerate(data["parts"]):
        try:
            part["entries"] = [_entry(kind, entry) for entry in part["entries"]]
            dict(part["environment"])
        except (KeyError, TypeError, ValueError) as error:
            raise ResultError(f"{path}: parts[{place}]: {error}") from error
    return list(data["parts"])


def _entry(kind: type, data: dict[str, Any]) -> Any:
    """A line, with the type of every field checked; TypeError or ValueError names the invalid one."""
    entry = kind(**data)
    for name, value in vars(entry).items():
        if name in ("op", "problem", "kernel", "yardstick"):
            if not isinstance(value, str):
                raise TypeError(f"{name}: expected text, found {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a positive number, found {value!r}")
    return entry


def find(parts: Sequence[dict[str, Any]], here: Place) -> tuple[dict[str, Any] | None, str]:
    """The part for this environment, or None and what differs from the nearest part."""
    nearest: list[str] | None = None
    for part in parts:
        recorded = part["environment"]
        mine = environment(here, portable="device" not in recorded)
        differs = [
            f"{name} is {mine.get(name)}, the baseline's is {value}"
            for name, value in recorded.items()
            if mine.get(name) != value
        ]
        if not differs:
            return part, ""
        nearest = differs if nearest is None or len(differs) < len(nearest) else nearest
    return None, "; ".join(nearest or ["the file holds no part"])


def update(
    path: Path, here: Place, rows: Sequence[Row], portable: bool, dropped: Collection[Any] = ()
) -> list[Entry]:
    """Put the ratios of `rows` into the part for this environment; other parts, and other lines of it but for those `dropped`,
    stay."""
    current = environment(here, portable)
    parts = read(path) if path.exists() else []
    part = next((p for p in parts if p["environment"] == current), None)
    if part is None:
        part = {"environment": current, "entries": []}
        parts.append(part)
    entries_by_key = {(e.op, e.problem, e.kernel): e for e in part["entries"] if e not in dropped}
    written = []
    for row in rows:
        if row.comparison is not None:
            entry = Entry(
                row.op,
                row.problem,
                row.kernel,
                row.baseline,
                *(
                    round(value, 5)
                    for value in (row.comparison.ratio, row.comparison.low, row.comparison.high)
                ),
            )
            entries_by_key[entry.op, entry.problem, entry.kernel] = entry
            written.append(entry)
    part["entries"] = [entries_by_key[key] for key in sorted(entries_by_key)]
    write(path, parts)
    return written


def write(path: Path, parts: Sequence[dict[str, Any]]) -> None:
    """Write a baseline file, one line per entry."""
    text = ",\n".join(_part_text(part) for part in parts)
    replace(path, f'{{"schema": {SCHEMA}, "parts": [\n{text}\n]}}\n')


def _part_text(part: dict[str, Any]) -> str:
    lines = ",\n".join(json.dumps(vars(entry)) for entry in part["entries"])
    return f'{{"environment": {json.dumps(part["environment"])}, "entries": [\n{lines}\n]}}'


def gone(entries: Sequence[Any]) -> dict[Any, str]:
    """Entries that can no longer be measured, with the reason: an operation, axis or kernel that does not exist."""
    reasons = {}
    for entry in entries:
        try:
            op = default_registry().op(entry.op)
            op.problem(entry.problem)
            for name in (entry.kernel, getattr(entry, "yardstick", entry.kernel)):
                default_registry().kernel(op.name, name)
        except (UnknownError, ValueError) as error:
            reasons[entry] = str(error)
    return reasons


def cases(entries: Sequence[Entry]) -> list[Case]:
    """The races for `entries`: one case per problem and yardstick."""
    registry = default_registry()
    grouped: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        grouped.setdefault((entry.op, entry.problem, entry.yardstick), []).append(entry)
    grouped_cases = []
    for (op_name, problem, yardstick), members in grouped.items():
        op = registry.op(op_name)
        others = tuple(named(op, entry.kernel)[0] for entry in members)
        grouped_cases.append(Case(op, op.problem(problem), registry.kernel(op_name, yardstick), others))
    return grouped_cases


def expected(entry: Entry, logs: Sequence[float]) -> float:
    """The log ratio to compare present ones with: the nearer end of the stored interval, so that the uncertainty of the
    baseline does not count against the kernel."""
    return min(max(statistics.median(logs), math.log(entry.low)), math.log(entry.high)) if logs else 0.0


def shifts(entries: Sequence[Entry]) -> Callable[[str, str, Sequence[float]], float]:
    """Continue a race until it is clear whether kernels have changed, not whether they are faster than their yardsticks."""
    by_key = {(f"{e.op} {e.problem}", e.kernel): e for e in entries}

    def shift(key: str, kernel: str, logs: Sequence[float]) -> float:
        entry = by_key.get((key, kernel))
        return 0.0 if entry is None else expected(entry, logs)

    return shift


def against(
    entries: Sequence[Entry], rows: Sequence[Row], rule: Rule, missing: Mapping[Entry, str] | None = None
) -> list[Checked]:
    """Compare measured rows with their entries and judge them together; `missing` has the reasons of entries without a row (`gone`)."""
    missing = missing or {}
    by_key = {(row.op, row.problem, row.kernel): row for row in rows}
    by_key |= {
        (e.op, e.problem, e.kernel): Row(e.op, e.problem, e.kernel, e.yardstick, GAP, why)
        for e, why in missing.items()
    }
    logs, timed = [], []
    for entry in entries:
        row = by_key[entry.op, entry.problem, entry.kernel]
        if row.comparison is None:
            continue
        own = [math.log(us / base) for us, base in zip(row.samples, row.baseline_samples, strict=True)]
        logs.append([log - expected(entry, own) for log in own])
        timed.append(entry)
    verdicts = dict(zip(timed, judge(logs, rule), strict=True))
    checked = []
    for entry in entries:
        row = by_key[entry.op, entry.problem, entry.kernel]
        yardstick = by_key.get((entry.op, entry.problem, entry.yardstick))
        if entry not in verdicts and yardstick is not None and yardstick.verdict == WRONG:
            checked.append(Checked(entry, WRONG, f"the yardstick is wrong: {yardstick.reason}", None, row))
            continue
        if entry not in verdicts:
            checked.append(Checked(entry, row.verdict, row.reason, None, row))
            continue
        verdict = verdicts[entry]
        noisy = row.noise is not None and row.noise > rule.min_effect
        reason = f"the yardstick differs from itself by {row.noise:.1%}" if noisy else verdict.reason
        assert row.comparison is not None
        checked.append(
            Checked(
                entry, UNCLEAR if noisy else verdict.verdict, reason, row.comparison.ratio / entry.ratio, row
            )
        )
    return checked


def exit_code(checked: Sequence[Checked]) -> int:
    """The most severe verdict: a wrong result before a slow one, a slow one before an unclear one."""
    verdicts = {row.verdict for row in checked}
    if WRONG in verdicts:
        return BAD
    if SLOWER in verdicts:
        return SLOW
    if GAP in verdicts:
        return ELSEWHERE
    return NOISY if UNCLEAR in verdicts else OK
