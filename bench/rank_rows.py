"""The times of collective kernels: by one process per rank, the slowest rank of each round.

As in `bench.timings`, a kernel is verified first; it is timed captured and eager, hot and cold. Kernels are timed one after the other, and
there is no floor: the time depends on the link between the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.autotune.place import Place
from gristmill.autotune.timing import summarize
from gristmill.autotune.worker_group import shared_group
from gristmill.bench.compare import WRONG
from gristmill.bench.timings import TIMINGS, gap_row
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

ROUNDS = 15
"""Of each timing mode."""


def rank_rows(
    op: Op,
    problem: Problem,
    kernels: Sequence[Kernel],
    here: Place,
    *,
    baseline: Kernel | None = None,
    configs: Mapping[str, Config] | None = None,
) -> list[dict[str, Any]]:
    """As `bench.timings.kernel_rows`, for a problem of several ranks."""
    held = [*kernels, *([baseline] if baseline is not None and baseline not in kernels else [])]
    rows = [_row(op, problem, kernel, here, (configs or {}).get(kernel.name)) for kernel in held]
    base = next((row for row in rows if baseline is not None and row["kernel"] == baseline.name), None)
    for row in rows:
        if base is not None:
            row["baseline"] = base["kernel"]
            if row["us"] is not None and base["us"] is not None:
                row["speedup"] = base["us"] / row["us"]
    return rows


def _row(op: Op, problem: Problem, kernel: Kernel, here: Place, config: Config | None) -> dict[str, Any]:
    if reason := here.why_not(kernel, problem):
        return gap_row(op, problem, kernel.name, reason)
    config = dict(kernel.config(problem, here.target) if config is None else config)
    group, device = shared_group(op.world(problem)), here.device or "cpu"
    row = gap_row(op, problem, kernel.name, "") | {"config": config}
    outcome = group.verify(op, kernel, config, op.verification(problem, kernel, config), device)
    if not outcome["ok"]:
        wrong = bool(outcome["judged"])
        reason = f"{WRONG if wrong else 'not timed'}: {outcome['reason']}"
        return row | {"reason": reason, "wrong": wrong}
    timed = group.time(op, kernel, config, problem, device, ROUNDS)
    if not timed["ok"]:
        return row | {"reason": f"not timed: {timed['reason']}"}
    for timing in TIMINGS:
        if samples := timed["times"].get(timing):
            measured = summarize(samples)
            row["times"][timing] = {"us": measured.us, "spread": measured.spread, "samples": measured.samples}
    first, cost = next(iter(row["times"])), op.cost(problem)
    us = row["times"][first]["us"]
    return row | {
        "timing": first,
        **row["times"][first],
        "gbs": cost.bytes / us / 1e3,
        "tflops": cost.flops / us / 1e6,
        "error": outcome["error"],
        "note": f"slowest of {op.world(problem)} ranks",
    }
