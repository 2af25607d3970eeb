"""MoE of dense weights in CUDA C++ for Hopper: permute, rows of x by expert, two products, combine.

The second product begins to read weights while the first one ends: the offsets that it needs are there. Weights stay as checkpoints have
them, in dense_v1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.combine.op import OP as COMBINE
from gristmill.kernels.moe.grouped_linear.dense_sm90 import shapes

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

PROMISING = 2
"""Choices for either product that are tried with each other, the best first; others are tried with the best one of the other product."""


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.moe import steps_sm90 as steps
    from gristmill.kernels.moe.grouped_linear.dense_sm90._launch import product

    if not call.x.shape[0]:
        return
    if call.x.stride(1) != 1 or call.x.stride(0) % 8 or call.x.data_ptr() % 16:
        raise ValueError(
            f"moe_dense_sm90: rows of x must be contiguous and start at multiples of 16 bytes, got strides {call.x.stride()}"
        )
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    space = _chain.views(call.workspace, call.x, call.ids.numel(), experts, inner)
    offsets, permutation, inverse = _chain.ordered(call, experts, space[:3], partial(steps.permute, {}))
    # In the memory of the second product's results.
    steps.gather_rows(call.x, permutation, offsets, call.ids.shape[1], space.rows)
    product(
        shape_of(config, 1),
        space.rows,
        call.w13,
        offsets,
        True,
        space.activations,
        call.w13_bias,
        (call.alpha, call.limit) if call.clamp else None,
        early=True,
        clear=False,
    )
    product(
        shape_of(config, 2),
        space.activations,
        call.w2,
        offsets,
        False,
        space.rows,
        call.w2_bias,
        None,
        early=True,
        clear=False,
    )
    steps.combine({}, COMBINE.Call(space.rows, inverse, call.weights, call.out))


def shape_of(config: Config, product: int) -> Config:
    """The configuration of a product, whose fields end with its number here."""
    return {name: config[f"{name}{product}"] for name in shapes.FIELDS}


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    w, x, (e, h, i) = problem.text("w"), problem.text("x"), problem.integers(*"ehi")
    return shapes.refusal(w, x, e, 2 * i, h, True) or shapes.refusal(w, x, e, h, i, False)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The best few choices for either product with each other, and every other one with the best of the other product."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    processors = target.multiprocessors or shapes.PROCESSORS
    of_products = [shapes.ranked(m * top_k, e, n, k, processors, top_k) for n, k in ((2 * i, h), (h, i))]
    places = sorted(
        itertools.product(*(range(len(one)) for one in of_products)), key=lambda pair: (sum(pair), pair)
    )
    for pair in places:
        if max(pair) < PROMISING or 0 in pair:
            yield {
                f"{name}{number}": value
                for number, (place, one) in enumerate(zip(pair, of_products, strict=True), 1)
                for name, value in shapes.config_of(one[place], processors).items()
            }


def config(problem: Problem, target: Target) -> Config:
    """What a model of the products' times expects to be the fastest."""
    return next(iter(space(problem, target)))


LAUNCHES, READS, PRODUCTS, ROWS, OVERLAP = 14.8, 1.06, 0.71, 3.03e6, 1.7
"""Microseconds of five launches; the bandwidth at which weights are read, by that of a copy; the part of the peak that products reach; bytes of
rows that are written and read again in a microsecond; the power of the sum by which reads and products hide each other. Fitted to 30 times of
1 to 4,096 tokens on an H200, of which they are 4 % off on average, 12 % at most."""


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds, where experts are chosen at random; None for a device of unknown ceilings."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    peak = target.peak(problem.text("x"))
    if not target.bandwidth_gbs or not peak:
        return None
    read = 6 * h * i * e * (1 - (1 - min(1, top_k / e)) ** m) / (READS * target.bandwidth_gbs * 1e3)
    multiplied = 6 * m * top_k * h * i / (PRODUCTS * peak * 1e6)
    rows = m * top_k * (8 * h + 4 * i) / ROWS
    return float(LAUNCHES + (read**OVERLAP + multiplied**OVERLAP) ** (1 / OVERLAP) + rows)


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the shapes of a configuration do not multiply the weights of `problem`."""
    e, h, i = problem.integers(*"ehi")
    return shapes.misfit_of(config, "1", h, e) or shapes.misfit_of(config, "2", i, e)


KERNEL = Kernel(
    op="moe",
    name="moe_dense_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="permute, rows by expert, products of dense weights on tiles found on the device, combine; 5 launches, each begins during the one before",
    accepts=accepts,
    config=config,
    space=space,
    misfit=misfit,
    estimate=estimate,
    reads=_chain.ORDER,
    workspace=_chain.workspace,
    layouts=("dense_v1",),
    examples=(
        "m=9,top_k=3,e=5,h=256,i=256",
        "m=200,top_k=2,e=4,h=256,i=272,x=fp16,w=fp16",
        "m=40,top_k=4,e=6,h=320,i=264,epilogue=w13_bias+w2_bias+clamp",
        "m=70,top_k=2,e=3,h=200,i=72",
    ),
    waits=True,
    triggers=True,
    priority=58,
)
