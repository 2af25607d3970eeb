"""The choice of layouts for the weights of a layer, and packing."""

from __future__ import annotations

import warnings

from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.linear import layout_for
from gristmill.kernels.linear.weight import LinearWeight
from gristmill.quant.packed import LayoutError
from gristmill.quant.tensor import QuantTensor

LAYOUT_SIZES = (1, 16, 256)
"""Batch sizes that determine the layouts of a weight; other sizes choose among kernels of those layouts."""


def plan_layouts(
    resolver: Resolver, problem: Problem, without: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The layouts in which the weights of a static problem are to be packed. without: those that cannot hold the weight."""
    key = (problem, without)
    if key not in resolver.chosen_layouts:
        op = resolver.registry.op(problem.op)
        if {"n", "k"} <= problem.as_dict().keys():
            chosen = resolver.plan(op, problem, LAYOUT_SIZES, without).layouts
        else:
            # Experts are packed once, for the kernel of a middling batch.
            best = resolver.resolve(op, op.at_bucket(problem, LAYOUT_SIZES[1])).require()
            chosen = (layout_for(best.kernel, QuantScheme.parse(problem.text("w"))).name,)
        resolver.chosen_layouts[key] = frozenset(chosen)
    return resolver.chosen_layouts[key]


def pack_linear(weight: QuantTensor, problem: Problem, resolver: Resolver) -> LinearWeight:
    """The weight in the layouts of the plan of its problem.

    A layout that supports the scheme may not support this weight. The plan is then made without it, with a warning.
    """
    refused: frozenset[str] = frozenset()
    while True:
        try:
            return LinearWeight.pack(weight, sorted(plan_layouts(resolver, problem, refused)))
        except LayoutError as error:
            refused |= {error.layout}
            warnings.warn(
                f"a weight of {problem} is not packed as {error.layout}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
