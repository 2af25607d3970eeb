"""The problems that a live run calls, and how often: recorded where plans are called, read back as calls to tune."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.bench.result_file import ResultError, parsed, replace
from gristmill.bench.shapes import Call, Step
from gristmill.kernel_registry.registry import default_registry

SCHEMA = 1
LIVE = Step(1, 1, 1)
"""The step of recorded calls, which is unknown."""


@contextlib.contextmanager
def capturing() -> Iterator[Counter[tuple[str, str]]]:
    """Count the problems that bound plans are called with, by (operation, problem), while the block runs.

    Operations with packed weights are counted at the size of their plan's axis; the others are described exactly. Calls
    inside a CUDA graph's replay are not seen: run without graphs. On a CPU no steps are recorded meanwhile.
    """
    from gristmill.autotune.bound import BoundPlan
    from gristmill.runtime.decode_graphs import DecodeGraphs

    counts: Counter[tuple[str, str]] = Counter()
    plain, record = BoundPlan.run, DecodeGraphs.record

    def run(plan: Any, call: Any) -> None:
        op = plan.op
        if op.pack is None:
            problem = op.problem(op.describe(*call.arguments()))
        else:
            problem = op.at_bucket(plan.static, plan._guard(call))
        if op.bucket is None or problem[op.bucket]:
            counts[op.name, str(problem)] += 1
        plain(plan, call)

    BoundPlan.run = run  # type: ignore[method-assign, assignment]
    DecodeGraphs.record = DecodeGraphs.compute  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        BoundPlan.run, DecodeGraphs.record = plain, record  # type: ignore[method-assign]


def write(path: Path, counts: Counter[tuple[str, str]], command: str) -> None:
    """Write the captured problems, most frequent first."""
    calls = [{"op": op, "problem": problem, "count": count} for (op, problem), count in counts.most_common()]
    lines = ",\n".join(json.dumps(call) for call in calls)
    replace(path, f'{{"schema": {SCHEMA}, "command": {json.dumps(command)}, "calls": [\n{lines}\n]}}\n')


def read(path: Path) -> list[Call]:
    """The calls of a captured file. ResultError: the file is invalid; the message says why."""
    data = parsed(path, "captured shapes")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("calls"), list):
        raise ResultError(
            f"{path}: expected captured shapes of schema {SCHEMA}; kernelbench shapes capture writes them"
        )
    calls = []
    for place, call in enumerate(data["calls"]):
        try:
            op = default_registry().op(call["op"])
            calls.append(
                Call(op.name, str(op.problem(call["problem"])), int(call["count"]), "captured", LIVE)
            )
        except (KeyError, TypeError, ValueError, LookupError) as error:
            raise ResultError(f"{path}: calls[{place}]: {error}") from error
    return calls
