"""The kernels that the plans of a model selected, as text and as data; and a warning about those that dequantize a weight in each call."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.dequantizing import advice, dequantizer, is_dequantizing
from gristmill.kernel_registry.plan import PlanEntry
from gristmill.kernel_registry.registry import default_registry
from gristmill.runtime.layers.plans import Plans


def explain_plans(plans: Plans) -> list[dict[str, Any]]:
    """One row per operation, static problem and bucket used so far.

    {"op", "problem", "m_max" (None = any larger size), "kernel", "layout", "source", "expected_us", "grade" (of proof), "reason"}
    """
    rows = []
    for bound in plans.bound.values():
        for index, entry in enumerate(bound.entries):
            if entry is None:
                continue
            row = entry.as_dict()
            row.pop("config")
            kernel = bound.resolver.kernel(bound.op, entry.kernel)
            row |= {"op": bound.op.name, "problem": str(bound.static)}
            row["grade"], proof = _proof(bound, index, entry)
            row["reason"] = _reason(
                proof,
                entry.source,
                entry.expected_us,
                kernel.priority,
                plans.policy.pinned(bound.op.name),
            ) + remark(bound, entry.kernel)
            rows.append(row)
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `explain_plans` by operation, kernel and reason: {"op", "kernel", "formats", "reason", "plans"}.

    "formats" are those of the operation's weights, [] if it has none; "plans" is the number of problems and sizes.
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


def _proof(bound: BoundPlan, index: int, entry: PlanEntry) -> tuple[str, str]:
    """The grade of proof by which a kernel runs, and what is known. Another process may have chosen it, by records that are not here."""
    candidates = bound.resolver.select(bound.op, bound.problem(index), bound.layouts).candidates
    for candidate in candidates:
        if candidate.kernel.name == entry.kernel and candidate.grade != "here":
            return candidate.grade, candidate.reasons[0]
    return "here", "verified here"


def _reason(proof: str, source: str, us: float | None, priority: int, pins: tuple[str, ...]) -> str:
    pinned = ("pinned by the policy; " if pins else "") + proof
    if source == "priority":
        return f"{pinned}; not timed: highest priority, {priority}"
    word = {
        "measured": "measured",
        "near": "measured on a near problem",
        "sibling": "measured on a sibling device",
    }
    return f"{pinned}; {word.get(source, 'estimated by the cost model')}: {us:.1f} µs"


def warn_of_slow_layers(model: str, plans: Plans) -> None:
    """Give one warning with all layers whose weights are dequantized in each call, by scheme, and what would be faster. `model` is its path."""
    counts: Counter[str] = Counter()
    for (problem, layouts), count in plans.layers.items():
        select = partial(plans.resolver.select, plans.resolver.registry.op(problem.op))
        kernel = dequantizer(select, problem, layouts)
        if kernel is not None:
            counts[f"of {problem.text('w')} ({kernel.name}{advice(select, problem)})"] += count
    if counts:
        warnings.warn(
            f"{model}: each call dequantizes the whole weight of "
            + ", ".join(f"{count} layers {kind}" for kind, count in counts.items()),
            RuntimeWarning,
            stacklevel=2,
        )


def remark(bound: BoundPlan, kernel: str) -> str:
    """What `explain` adds to the reason of a kernel that dequantizes the weight of a plan; "" for others."""
    problem, resolver = bound.static, bound.resolver
    if not is_dequantizing(resolver.kernel(bound.op, kernel), problem):
        return ""
    ways = advice(partial(resolver.select, bound.op), problem)
    return f"; dequantizes the whole weight in each call{ways}"
