"""Result files over time: one series per row, and its changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.bench.result_file import device_of, samples, series, timed

Key = tuple[str, str, str, str]
"""Operation, problem, series (a kernel, and how it was timed where that is not the usual way), device."""

FEW = 5
"""With fewer samples than this the spread of a file is not used, and a change is judged by its size alone."""


@dataclass(frozen=True)
class Point:
    """One row in one file; `change` is its ratio to the samples since the last change, None if it did not change."""

    when: str
    file: str
    us: float
    change: float | None


@dataclass
class Series:
    """The points of one row, by date."""

    key: Key
    points: list[Point] = field(default_factory=list)


def history(files: Sequence[tuple[str, dict[str, Any]]], min_effect: float = 0.05) -> list[Series]:
    """Series of (name, content) pairs. A point is a change if its median differs from that of all samples since the last
    change by more than the minimum effect, and by more than both spreads allow.
    """
    histories: dict[Key, Series] = {}
    stretch: dict[Key, list[float]] = {}
    for name, data in sorted(files, key=lambda pair: str(pair[1].get("when", ""))):
        device, target = device_of(data), data.get("environment", {}).get("target")
        for row in timed(data):
            key = (row["op"], row["problem"], series(row, target), device)
            one, before, taken = (
                histories.setdefault(key, Series(key)),
                stretch.setdefault(key, []),
                samples(row),
            )
            change = _change(before, taken, min_effect)
            stretch[key] = taken if change is not None else [*before, *taken]
            one.points.append(Point(str(data.get("when", "")), name, statistics.median(taken), change))
    return list(histories.values())


def _change(before: Sequence[float], after: Sequence[float], min_effect: float) -> float | None:
    if not before:
        return None
    old, new = statistics.median(before), statistics.median(after)
    if max(old, new) / min(old, new) <= 1 + min_effect:
        return None
    return new / old if abs(new - old) > median_error(before) + median_error(after) else None


def median_error(values: Sequence[float]) -> float:
    """About two standard errors of a median, from the interquartile range (McGill, Tukey and Larsen, 1978)."""
    if len(values) < FEW:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return 1.57 * (high - low) / math.sqrt(len(values))
