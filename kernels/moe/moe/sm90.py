"""MoE in CUDA C++ for Hopper over frag16 tiles: permute, rows of x by expert, two products, combine.

The second product begins to read weights while the first one ends: the offsets that it needs are there. With few tokens the
first product gathers the rows of x by itself, which saves a launch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.combine.op import OP as COMBINE
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import shapes

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

GATHERED = 64
"""Entries of ids up to which the first product gathers rows of x by itself."""


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.moe import steps_sm90 as steps
    from gristmill.kernels.moe.grouped_linear.frag16_sm90._launch import product

    if call.w13_bias is not None or call.w2_bias is not None or call.clamp:
        raise ValueError("moe_sm90 has no biases and no clamped activation; moe_chain_w_triton does")
    if not call.x.shape[0]:
        return
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    space = _chain.views(call.workspace, call.x, call.ids.numel(), experts, inner)
    offsets, permutation, inverse = _chain.ordered(call, experts, space[:3], partial(steps.permute, {}))
    top_k, gathered = call.ids.shape[1], call.ids.numel() <= GATHERED
    if not gathered:  # in the memory of the second product's results
        steps.gather_rows(call.x, permutation, offsets, top_k, space.rows)
    product(
        {**config, **_shape(config, 1)},
        call.x if gathered else space.rows,
        call.w13,
        offsets,
        permutation if gathered else None,
        top_k if gathered else 1,
        True,
        space.activations,
        early=not gathered,
        clear=False,
    )
    product(
        {**config, **_shape(config, 2)},
        space.activations,
        call.w2,
        offsets,
        None,
        1,
        False,
        space.rows,
        early=True,
        clear=False,
    )
    steps.combine({}, COMBINE.Call(space.rows, inverse, call.weights, call.out))


def _shape(config: Config, product: int) -> Config:
    """The fields of a product's shape, without the number that ends their names."""
    return {name: config[f"{name}{product}"] for name in ("mt", "c", "slices", "ctas", "grid")}


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    beside = problem.flags("epilogue")
    if beside:
        return f"its epilogue is silu(gate) · up alone, without {' and '.join(beside)}"
    scheme, x, (e, h, i) = QuantScheme.parse(problem.text("w")), problem.text("x"), problem.integers(*"ehi")
    return shapes.refusal(scheme, x, e, 2 * i, h, True) or shapes.refusal(scheme, x, e, h, i, False)


def config(problem: Problem, target: Target) -> Config:
    """The shapes of both products, by the rows that an expert has on average."""
    form = shapes.format_of(QuantScheme.parse(problem.text("w")))
    if form is None:
        raise ValueError(f"moe_sm90: {accepts(problem)}")
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    processors = target.multiprocessors or 132
    fields: dict[str, int | float | str | bool] = {}
    for number, n, k in ((1, 2 * i, h), (2, h, i)):
        shape = shapes.shape_for(m * top_k, e, n, k, number == 1, processors)
        for name, value in shapes.config_of(form, shape, processors).items():
            fields[name if name in ("format", "tile_bytes") else f"{name}{number}"] = value
    return fields


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the shapes of a configuration do not multiply the weights of `problem`."""
    h, i = problem.integers(*"hi")
    return shapes.misfit_of(config, "1", h, True) or shapes.misfit_of(config, "2", i, False)


KERNEL = Kernel(
    op="moe",
    name="moe_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="permute, products of experts on tiles found on the device, combine; 4 or 5 launches, each begins during the one before",
    accepts=accepts,
    config=config,
    misfit=misfit,
    reads=_chain.ORDER,
    workspace=_chain.workspace,
    layouts=("w4_frag16_v1", "f4_frag16_v1"),
    examples=(
        "m=9,top_k=3,e=5,h=128,i=128,w=int4_g128",
        "m=33,top_k=2,e=4,h=256,i=384,x=fp16,w=int4_g128",
        "m=40,top_k=4,e=6,h=96,i=96,w=mxfp4",
    ),
    waits=True,
    triggers=True,
    priority=108,
    proven="sm_90: H200",
)
