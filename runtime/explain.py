"""What a model's plans chose, for people and for machines."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.registry import default_registry
from gristmill.runtime.layers.plans import Plans


def explain_plans(plans: Plans) -> list[dict[str, Any]]:
    """One row for each operation, static problem and bucket met so far.

    {"op", "problem", "m_max" (None = any larger size), "kernel", "layout", "source", "expected_us", "reason"}
    """
    rows = []
    for bound in plans.bound.values():
        for entry in bound.entries:
            if entry is None:
                continue
            row = entry.as_dict()
            row.pop("config")
            kernel = bound.resolver.kernel(bound.op, entry.kernel)
            row |= {"op": bound.op.name, "problem": str(bound.static)}
            row["reason"] = _reason(entry.source, entry.expected_us, kernel.priority, plans.policy.pinned(bound.op.name))
            rows.append(row)
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `explain_plans` by operation, weight format and kernel: {"op", "w", "kernel", "reason", "plans"}."""
    found: dict[tuple[str, str, str, str], int] = {}
    for row in rows:
        problem = default_registry().op(row["op"]).problem(row["problem"])
        scheme = next((str(value) for name, value in problem.values if name == "w"), "")
        key = (row["op"], scheme, row["kernel"], row["reason"])
        found[key] = found.get(key, 0) + 1
    return [dict(zip(("op", "w", "kernel", "reason", "plans"), (*key, count), strict=True)) for key, count in found.items()]


def _reason(source: str, us: float | None, priority: int, pins: tuple[str, ...]) -> str:
    pinned = "pinned by the policy; " if pins else ""
    if source == "priority":
        return f"{pinned}verified here; not timed yet, declared priority {priority} is the highest"
    word = {"measured": "measured", "near": "measured on a near problem", "sibling": "measured on a sibling device"}
    return f"{pinned}verified here; {word.get(source, 'estimated by the cost model')}: {us:.1f} µs"
