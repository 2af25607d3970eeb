"""The kernels that the plans of a model selected, as text and as data."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.registry import default_registry
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.slow_layers import remark


def explain_plans(plans: Plans) -> list[dict[str, Any]]:
    """One row per operation, static problem and bucket used so far.

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
            row["reason"] = _reason(
                entry.source, entry.expected_us, kernel.priority, plans.policy.pinned(bound.op.name)
            ) + remark(bound, entry.kernel)
            rows.append(row)
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `explain_plans` by operation, kernel and reason: {"op", "kernel", "formats", "reason", "plans"}.

    formats: of the operation's weights, [] if it has none. plans: the number of problems and sizes.
    """
    entries: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["op"], row["kernel"], row["reason"])
        entry = entries.setdefault(
            key, {"op": key[0], "kernel": key[1], "formats": [], "reason": key[2], "plans": 0}
        )
        entry["plans"] += 1
        scheme = default_registry().op(row["op"]).problem(row["problem"]).as_dict().get("w")
        if scheme is not None and str(scheme) not in entry["formats"]:
            entry["formats"].append(str(scheme))
    return list(entries.values())


def _reason(source: str, us: float | None, priority: int, pins: tuple[str, ...]) -> str:
    pinned = "pinned by the policy; " if pins else ""
    if source == "priority":
        return f"{pinned}verified here; not timed: highest priority, {priority}"
    word = {
        "measured": "measured",
        "near": "measured on a near problem",
        "sibling": "measured on a sibling device",
    }
    return f"{pinned}verified here; {word.get(source, 'estimated by the cost model')}: {us:.1f} µs"
