"""MoE with biases or the clamped activation on Hopper: the products of moe_sm90, and what follows each in a Triton kernel of its own.

The products over frag16 tiles have neither bias nor clamp. Gate and up are rounded to x's dtype between the first product and the
activation, as rows are between the second and the sum.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe._swiglu_triton import swiglu
from gristmill.kernels.moe.combine.op import OP as COMBINE
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import shapes

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

GATHERED = 64
"""Entries of ids up to which the first product gathers rows of x by itself, as in moe_sm90."""
BLOCK = 1024


@jit
def activation_kernel(
    z,
    bias,
    offsets,
    acts,
    experts,
    inner,
    alpha,
    limit,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    BE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate and up [P, 2 I] plus the bias of the row's expert -> [P, I]; rows past the last expert's are not written."""
    row = tl.program_id(0)
    e = tl.arange(0, BE)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=2147483647)
    expert = tl.sum((ends <= row).to(tl.int32), 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < inner) & (columns * 0 + expert < experts)
    of_row = z + row.to(tl.int64) * 2 * inner + columns
    gate = tl.load(of_row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(of_row + inner, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        of_expert = bias + expert.to(tl.int64) * 2 * inner + columns
        gate += tl.load(of_expert, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(of_expert + inner, mask=inside, other=0.0).to(tl.float32)
    y = swiglu(gate, up, alpha, limit, CLAMP)
    tl.store(acts + row.to(tl.int64) * inner + columns, y.to(acts.dtype.element_ty), mask=inside)


@jit
def biased_combine_kernel(rows, bias, ids, inverse, weights, out, top_k, hidden, BLOCK: tl.constexpr):
    """Sums over k in order of weight · (row + bias of its expert), in float32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(top_k):
        place = tl.load(inverse + token * top_k + k).to(tl.int64)
        weight = tl.load(weights + token * top_k + k)
        valid = inside & (columns * 0 + place >= 0)
        row = tl.load(rows + place * hidden + columns, mask=valid, other=0.0).to(tl.float32)
        expert = tl.load(ids + token * top_k + k).to(tl.int64)
        row += tl.load(bias + expert * hidden + columns, mask=valid, other=0.0).to(tl.float32)
        total += tl.where(valid, weight * row, 0.0)
    tl.store(out + token * hidden + columns, total.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    import torch

    from gristmill.kernels.moe import steps_sm90 as steps
    from gristmill.kernels.moe.grouped_linear.frag16_sm90._launch import product

    workspace = call.workspace

    (tokens, hidden), top_k = call.x.shape, call.ids.shape[1]
    if not tokens:
        return
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    entries, item = call.ids.numel(), call.x.element_size()
    if workspace is None:
        workspace = call.x.new_empty(_bytes(entries, experts, hidden, inner, item), dtype=torch.uint8)
    sizes = _sizes(entries, experts, hidden, inner, item)
    z = _chain.carve(workspace, call.x, sizes)[-1].view(call.x.dtype).view(entries, 2 * inner)
    space = _chain.views(workspace, call.x, entries, experts, inner)
    offsets, permutation, inverse = _chain.ordered(call, experts, space[:3], partial(steps.permute, {}))
    gathered = entries <= GATHERED
    if not gathered:  # in the memory of the second product's results
        steps.gather_rows(call.x, permutation, offsets, top_k, space.rows)
    product(
        {**config, **shape_of(config, 1)},
        call.x if gathered else space.rows,
        call.w13,
        offsets,
        permutation if gathered else None,
        top_k if gathered else 1,
        False,
        z,
        early=not gathered,
        clear=False,
    )
    activation_kernel[(entries, cdiv(inner, BLOCK))](
        z,
        z if call.w13_bias is None else call.w13_bias,
        offsets,
        space.activations,
        experts,
        inner,
        call.alpha,
        call.limit,
        BIAS=call.w13_bias is not None,
        CLAMP=call.clamp,
        BE=next_power_of_2(experts),
        BLOCK=BLOCK,
    )
    product(
        {**config, **shape_of(config, 2)},
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
    if call.w2_bias is None:
        steps.combine({}, COMBINE.Call(space.rows, inverse, call.weights, call.out))
        return
    biased_combine_kernel[(tokens, cdiv(hidden, BLOCK))](
        space.rows, call.w2_bias, call.ids, inverse, call.weights, call.out, top_k, hidden, BLOCK=BLOCK
    )


def shape_of(config: Config, product: int) -> Config:
    """The fields of a product's shape, without the number that ends their names."""
    return {name: config[f"{name}{product}"] for name in ("mt", "c", "slices", "ctas", "grid")}


def _sizes(entries: int, experts: int, hidden: int, inner: int, item: int) -> tuple[int, ...]:
    """Bytes of the chain's pieces, and of gate and up."""
    return *_chain.pieces(entries, experts, hidden, inner, item), 2 * entries * inner * item


def _bytes(entries: int, experts: int, hidden: int, inner: int, item: int) -> int:
    return _chain.room(_sizes(entries, experts, hidden, inner, item))


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of all intermediate tensors."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    return Workspace(_bytes(m * top_k, e, h, i, ITEM_BYTES[problem.text("x")]))


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    if not problem.flags("epilogue"):
        return "made for biases and the clamped activation; moe_sm90 is faster without"
    scheme, x, (e, h, i) = QuantScheme.parse(problem.text("w")), problem.text("x"), problem.integers(*"ehi")
    return shapes.refusal(scheme, x, e, 2 * i, h, False) or shapes.refusal(scheme, x, e, h, i, False)


def config(problem: Problem, target: Target) -> Config:
    """The shapes of both products, by the rows that an expert has on average."""
    form = shapes.format_of(QuantScheme.parse(problem.text("w")))
    if form is None:
        raise ValueError(f"moe_epilogue_sm90: {accepts(problem)}")
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    processors = target.multiprocessors or 132
    fields: dict[str, int | float | str | bool] = {"format": form.name, "tile_bytes": form.tile_bytes}
    for number, n, k in ((1, 2 * i, h), (2, h, i)):
        shape = shapes.shape_for(m * top_k, e, n, k, False, processors)
        product = shapes.config_of(form, shape, processors)
        fields |= {f"{name}{number}": product[name] for name in ("mt", "c", "slices", "ctas", "grid")}
    return fields


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the shapes of a configuration do not multiply the weights of `problem`."""
    h, i = problem.integers(*"hi")
    return shapes.misfit_of(config, "1", h, False) or shapes.misfit_of(config, "2", i, False)


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: both kernels for gpt-oss."""
    gated = {
        "z": "*bf16",
        "bias": "*bf16",
        "offsets": "*i32",
        "acts": "*bf16",
        "experts": "i32",
        "inner": "i32",
    }
    gated |= {"alpha": "fp32", "limit": "fp32"}
    summed = {
        "rows": "*bf16",
        "bias": "*bf16",
        "ids": "*i32",
        "inverse": "*i32",
        "weights": "*fp32",
        "out": "*bf16",
    }
    summed |= {"top_k": "i32", "hidden": "i32"}
    clamped = {"BIAS": True, "CLAMP": True, "BE": 128, "BLOCK": BLOCK}
    return [
        AotCase("activation", activation_kernel, gated, clamped, {"num_warps": 4}, ("inner",)),
        AotCase("combine", biased_combine_kernel, summed, {"BLOCK": BLOCK}, {"num_warps": 4}, ("hidden",)),
    ]


KERNEL = Kernel(
    op="moe",
    name="moe_epilogue_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(
        features=(frozenset({"wgmma", "tma"}),),
        vendors=("nvidia",),
        packages=(("triton", "3.6"),),
        code="cuda:sm_90a",
    ),
    summary="products of moe_sm90; biases, activation and weighted sum in Triton between and after them",
    accepts=accepts,
    config=config,
    misfit=misfit,
    reads=_chain.ORDER,
    workspace=workspace,
    layouts=("w4_frag16_v1", "f4_frag16_v1"),
    examples=(
        "m=9,top_k=3,e=5,h=128,i=136,w=int4_g128,epilogue=w13_bias",
        "m=33,top_k=2,e=4,h=256,i=384,x=fp16,w=int4_g128,epilogue=w2_bias+clamp",
        "m=40,top_k=4,e=6,h=96,i=96,w=mxfp4,epilogue=w13_bias+w2_bias+clamp",
    ),
    waits=True,
    priority=90,
    proven="sm_90: H200",
)
