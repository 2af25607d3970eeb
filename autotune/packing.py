"""The choice of layouts for the weights of a layer, and packing."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace

from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import bucket_sizes, readable
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.select import NoKernelError, Selection, able
from gristmill.kernels.linear.weight import LinearWeight
from gristmill.quant.packed import LayoutError
from gristmill.quant.tensor import QuantTensor

LAYOUT_SIZES = (1, 16, 256)
"""Batch sizes that determine the layouts of a weight; other sizes choose among kernels of those layouts."""


def plan_layouts(
    resolver: Resolver, problem: Problem, without: frozenset[str] = frozenset(), layer: str = ""
) -> frozenset[str]:
    """The layouts in which the weights of a static problem are to be packed.

    Once weights are packed, only kernels that read their layouts can serve them. Calls of every bucket therefore have several such
    kernels, or one that has matched the reference here: where one kernel is left it is verified now, and if it fails, the layouts are
    not used, with a warning.

    Args:
        without: those that cannot hold the weight.
        layer: its name in messages.

    Raises:
        NoKernelError: no layout has a kernel for every size. The message has the problem, the kernels and their reasons.
    """
    key = (problem, without)
    if key not in resolver.chosen_layouts:
        if resolver.chooser is not None:
            chosen = resolver.chooser.layouts(problem, without)
        else:
            chosen = _lasting(resolver, problem, without, f"{layer}: " if layer else "")
        resolver.chosen_layouts.setdefault(key, chosen)  # all threads, and so all ranks, get the first
    return resolver.chosen_layouts[key]


def pack_linear(weight: QuantTensor, problem: Problem, resolver: Resolver, layer: str = "") -> LinearWeight:
    """The weight in the layouts of the plan of its problem; messages call it `layer`.

    A layout that supports the scheme may not support this weight. The plan is then made without it, with a warning.
    """
    refused: frozenset[str] = frozenset()
    while True:
        try:
            return LinearWeight.pack(weight, sorted(plan_layouts(resolver, problem, refused, layer)))
        except LayoutError as error:
            refused |= {error.layout}
            warnings.warn(
                f"a weight of {problem} is not packed as {error.layout}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def _lasting(resolver: Resolver, problem: Problem, without: frozenset[str], layer: str) -> frozenset[str]:
    """The fastest layouts whose kernels serve every size."""
    op, lost = resolver.registry.op(problem.op), list[str]()
    while True:
        try:
            chosen = _fastest(resolver, op, problem, without)
        except NoKernelError as error:
            raise NoKernelError("\n".join([f"{layer}{error}", *lost])) from error
        gap = _gap(resolver, op, problem, chosen)
        if gap is None:
            return chosen
        reading = [c for c in gap.candidates if chosen & {*c.kernel.layouts}]
        reasons = "; ".join(f"{c.kernel.name} is {c.verdict}: {', '.join(c.reasons)}" for c in reading)
        names = " and ".join(sorted(chosen))
        lost.append(f"  layout {names}: {gap.problem}: {reasons}")
        warnings.warn(
            f"{layer}weights of {op.name} {problem} are not packed as {names}, which no kernel reads for {gap.problem}: {reasons}",
            RuntimeWarning,
            stacklevel=3,
        )
        without |= chosen


def _fastest(resolver: Resolver, op: Op, problem: Problem, without: frozenset[str]) -> frozenset[str]:
    """The layouts of the fastest kernels for a few sizes."""
    scheme, kernels = problem.text("w"), resolver.fitting(op).kernels
    layouts = readable(kernels, resolver.registry.layouts, resolver.target, resolver.build, without)
    held = [name for name, layout in layouts.items() if layout.accepts(scheme)]
    if not held:
        raise NoKernelError(
            f"no layout that holds {scheme} has a kernel for {op.name} {problem} on {resolver.target.name}"
        )
    if {"n", "k"} <= problem.as_dict().keys():
        return frozenset(resolver.plan(op, problem, LAYOUT_SIZES, without).layouts)
    # Experts are packed once, for the kernel of a middling batch.
    best = resolver.resolve(op, op.at_bucket(problem, LAYOUT_SIZES[1]), frozenset(held)).require()
    return frozenset([next(name for name in best.kernel.layouts if name in held)])


def _gap(resolver: Resolver, op: Op, problem: Problem, layouts: frozenset[str]) -> Selection | None:
    """The first bucket that kernels over the layouts do not serve; None if they serve all."""
    failed = {r.kernel for r in list(resolver.store.verifications.values()) if r.op == op.name and not r.ok}
    fitting = resolver.fitting(op)
    readers = replace(fitting, kernels=tuple(k for k in fitting.kernels if layouts & {*k.layouts}))
    for size in bucket_sizes():
        at = op.at_bucket(problem, size)
        candidates = able(op, at, readers, resolver.target, resolver.build, resolver.policy, layouts)
        if len({kernel.name for kernel in candidates} - failed) > 1:
            continue  # should one fail its verification, the next is tried
        with suppress(UnverifiableError):  # for want of memory here, for example: no verdict
            selection = resolver.resolve(op, at, layouts)
            if selection.best is None:
                return selection
    return None
