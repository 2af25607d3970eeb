"""The rows of result files, prepared for the page: rates, spread, device, provider and series."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.bench import result_file
from gristmill.bench.history import FEW, median_error
from gristmill.kernel_registry.registry import UnknownError, default_registry

Files = Sequence[tuple[str, dict[str, Any]]]
"""(name, content) of result files."""


@dataclass
class PageRow:
    """A row that has a time.

    Attributes:
        us: median microseconds per call.
        low, high: the quartiles of its samples, None with fewer than three.
        margin: uncertainty of the median in microseconds, None with fewer than five.
        provider: whose kernel it is.
        series: the kernel, and its timing mode if that is not the default.
        static: the problem without its dynamic axes.
        size: the dynamic axis, if there is one.
        bytes, flops, unit: the cost of the problem, None if the operation or an axis no longer exists.
        floor: measured floor over measured time.
        timing: the timing mode, "" if the file has none.
        others: microseconds in other timing modes (hot, eager).
        speedup: the baseline and the speedup over it.
    """

    number: int
    file: str
    when: str
    device: str
    op: str
    problem: str
    kernel: str
    provider: str
    series: str
    us: float
    low: float | None
    high: float | None
    margin: float | None
    static: str
    size: int | None
    bytes: float | None
    flops: float | None
    unit: str | None
    gbs: float | None
    tflops: float | None
    floor: float | None
    error: float | None
    verdict: str
    repro: str
    timing: str
    others: dict[str, float]
    speedup: tuple[str, float] | None

    @property
    def short(self) -> str:
        """The series without the operation's name before it."""
        return self.series.removeprefix(f"{self.op}_")


def page_rows(files: Files) -> list[PageRow]:
    """Every row with a time, numbered in order."""
    pairs = [(name, data, row) for name, data in files for row in result_file.timed(data)]
    return [_row(number, *pair) for number, pair in enumerate(pairs)]


def provider_of(op: str, kernel: str) -> str:
    """The provider of a kernel; of a kernel that is not registered, the last part of its name, such as humming."""
    try:
        return default_registry().kernel(op, kernel).provider
    except UnknownError:
        return kernel.rpartition("_")[2]


def latest(rows: Iterable[PageRow]) -> list[PageRow]:
    """Of rows that measure the same on the same device, the newest; of undated ones, the last."""
    newest: dict[tuple[str, ...], PageRow] = {}
    for row in sorted(rows, key=lambda row: row.when):
        newest[row.device, row.op, row.problem, row.series] = row
    return sorted(newest.values(), key=lambda row: row.number)


def tied(first: PageRow, second: PageRow) -> bool:
    """Whether the samples do not separate two rows."""
    return abs(first.us - second.us) <= (first.margin or 0.0) + (second.margin or 0.0)


def _row(number: int, name: str, data: dict[str, Any], row: dict[str, Any]) -> PageRow:
    target = data.get("environment", {}).get("target")
    taken, us = result_file.samples(row), float(row["us"])
    few, timing = len(taken) < 3, str(row.get("timing") or "")
    low, _, high = (us, us, us) if few else statistics.quantiles(taken, n=4, method="inclusive")
    page_row = PageRow(
        number=number,
        file=name,
        when=str(data.get("when") or ""),
        device=result_file.device_of(data),
        op=row["op"],
        problem=row["problem"],
        kernel=row["kernel"],
        provider=provider_of(row["op"], row["kernel"]),
        series=result_file.series(row, target),
        us=us,
        low=None if few else low,
        high=None if few else high,
        margin=median_error(taken) if len(taken) >= FEW else None,
        static=row["problem"],
        size=None,
        bytes=None,
        flops=None,
        unit=None,
        gbs=row.get("gbs"),
        tflops=row.get("tflops"),
        floor=row.get("fraction_of_floor"),
        error=row.get("error"),
        verdict=row.get("verdict") or "",
        repro=result_file.command(row, target),
        timing=timing,
        others={
            name: one["us"]
            for name, one in (row.get("times") or {}).items()
            if name != timing and isinstance(one.get("us"), int | float)  # of `regret`: of each configuration
        },
        speedup=(row["baseline"], row["speedup"]) if row.get("baseline") and row.get("speedup") else None,
    )
    try:
        op = default_registry().op(page_row.op)
        problem = op.problem(page_row.problem)
    except (UnknownError, ValueError):
        return page_row  # the operation or an axis no longer exists; the times are still shown
    cost = op.cost(problem)
    page_row.bytes, page_row.flops, page_row.unit, page_row.static = (
        cost.bytes,
        cost.flops,
        cost.unit,
        str(op.static(problem)),
    )
    page_row.gbs = page_row.gbs or cost.bytes / us / 1e3
    page_row.tflops = page_row.tflops or cost.flops / us / 1e6
    if op.bucket is not None:
        page_row.size = problem.integer(op.bucket)
    return page_row
