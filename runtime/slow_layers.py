"""Layers whose weights are dequantized in each call: named when a model is loaded, and in `explain`."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.dequantizing import advice, dequantizer, is_dequantizing
from gristmill.runtime.layers.plans import Plans


def warn_of_slow_layers(model: str, plans: Plans) -> None:
    """One warning with all layers whose weights are dequantized in each call, by scheme, and what would be faster. model: its path."""
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
