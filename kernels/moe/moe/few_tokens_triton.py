"""MoE of dense weights for a few tokens, in two launches: a product per token and expert, then one per token over all of its experts.

With so few tokens hardly two of them share an expert, so that nothing is gained from sorted rows. The weights of an entry of ids are read from
memory to registers and multiplied in float32 without tensor cores; permute, combine and their launches fall away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe._swiglu_triton import swiglu

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

SHARE = 4
"""Entries of ids are at most this part of the experts: then few weights are read twice."""

SHAPES = ((2, 1024, 4), (4, 512, 4), (4, 1024, 8), (8, 512, 8), (8, 256, 4))
"""Rows of weights of a program, the most columns at a time, and warps, for either product."""
MORE = ((1, 1024, 4), (1, 2048, 4), (2, 512, 2), (2, 2048, 8), (4, 256, 2))
"""Those that are tried for one product only."""
DEFAULT = (SHAPES[0], MORE[0])
"""Of both products. One row per program is the fastest for the second: by 5 and 7 % beside two, of two models' single tokens on an H200."""

LAUNCHES, READS = 11.6, 1.06
"""Microseconds of both launches; the bandwidth at which weights are read, by that of a copy. Fitted to one token of 2 of 16 and of 6 of 64 experts on
an H200. Those of 8 of 128, on another, are 2 % longer, of two and four such tokens with two rows per program of the second product 8 and 7 %."""


@jit
def gate_and_up_kernel(
    x,
    ids,
    w13,
    bias,
    activations,
    top_k,
    experts,
    hidden,
    inner,
    alpha,
    limit,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """silu(gate) · up of ROWS of an entry's inner values; STEP columns of x at a time."""
    begin(OVERLAP)
    entry = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < inner
    expert = tl.load(ids + entry).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        of_gate = w13 + (expert * 2 * inner + rows)[:, None] * hidden
        of_up = w13 + (expert * 2 * inner + inner + rows)[:, None] * hidden
        gate = tl.zeros([ROWS, STEP], dtype=tl.float32)
        up = tl.zeros([ROWS, STEP], dtype=tl.float32)
        for start in range(0, hidden, STEP):
            columns = start + tl.arange(0, STEP)
            mask = inside[:, None] & (columns < hidden)[None, :]
            values = tl.load(x + entry // top_k * hidden + columns, mask=columns < hidden, other=0.0)
            values = values.to(tl.float32)[None, :]
            gate += values * tl.load(of_gate + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            up += values * tl.load(of_up + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        g, u = tl.sum(gate, 1), tl.sum(up, 1)
        if BIAS:
            of_expert = bias + expert * 2 * inner + rows
            g += tl.load(of_expert, mask=inside, other=0.0).to(tl.float32)
            u += tl.load(of_expert + inner, mask=inside, other=0.0).to(tl.float32)
        y = swiglu(g, u, alpha, limit, CLAMP)
        tl.store(activations + entry * inner + rows, y.to(activations.dtype.element_ty), mask=inside)


@jit
def down_kernel(
    activations,
    ids,
    weights,
    w2,
    bias,
    out,
    top_k,
    experts,
    hidden,
    inner,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ROWS values of a token: the sum over its experts, k in order."""
    begin(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < hidden
    total = tl.zeros([ROWS, STEP], dtype=tl.float32)
    of_bias = tl.zeros([ROWS], dtype=tl.float32)
    for k in range(top_k):
        entry = token * top_k + k
        expert = tl.load(ids + entry).to(tl.int64)
        if (expert >= 0) & (expert < experts):
            weight = tl.load(weights + entry)
            of_row = w2 + (expert * hidden + rows)[:, None] * inner
            for start in range(0, inner, STEP):
                columns = start + tl.arange(0, STEP)
                mask = inside[:, None] & (columns < inner)[None, :]
                values = tl.load(activations + entry * inner + columns, mask=columns < inner, other=0.0)
                values = values.to(tl.float32) * weight
                total += values[None, :] * tl.load(of_row + columns[None, :], mask=mask, other=0.0).to(
                    tl.float32
                )
            if BIAS:
                of_bias += weight * tl.load(bias + expert * hidden + rows, mask=inside, other=0.0).to(
                    tl.float32
                )
    y = tl.sum(total, 1) + of_bias
    tl.store(out + token * hidden + rows, y.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation."""
    (tokens, hidden), entries = call.x.shape, call.ids.numel()
    if not tokens:
        return
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    (space,) = _chain.carve(call.workspace, call.x, (entries * inner * call.x.element_size(),))
    activations = space.view(call.x.dtype)
    rows1, rows2 = int(config["rows1"]), int(config["rows2"])
    gate_and_up_kernel[(cdiv(inner, rows1), entries)](
        call.x,
        call.ids,
        call.w13[0],
        call.x if call.w13_bias is None else call.w13_bias,
        activations,
        call.ids.shape[1],
        experts,
        hidden,
        inner,
        call.alpha,
        call.limit,
        BIAS=call.w13_bias is not None,
        CLAMP=call.clamp,
        ROWS=rows1,
        STEP=int(config["step1"]),
        num_warps=int(config["warps1"]),
        **overlapped(call.x),
    )
    down_kernel[(cdiv(hidden, rows2), tokens)](
        activations,
        call.ids,
        call.weights,
        call.w2[0],
        call.x if call.w2_bias is None else call.w2_bias,
        call.out,
        call.ids.shape[1],
        experts,
        hidden,
        inner,
        BIAS=call.w2_bias is not None,
        ROWS=rows2,
        STEP=int(config["step2"]),
        num_warps=int(config["warps2"]),
        **overlapped(call.x),
    )


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    scheme = QuantScheme.parse(problem.text("w"))
    if not scheme.is_dense:
        return f"multiplies dense weights, not {scheme}"
    m, top_k, e = problem.integers("m", "top_k", "e")
    if m > 1 and SHARE * m * top_k > e:
        return f"reads weights once per token and expert: needs one token, or at most {e // SHARE} entries of {e} experts, got {m * top_k}"
    return None


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Shapes of both products together, the default first; others of one of them beside the first or second of the other.

    A product of few rows of weights keeps every multiprocessor reading to its end if its programs are small.
    """
    sizes = problem.integers("h", "i")

    def shape(product: int, rows: int, most: int, warps: int) -> dict[str, int]:
        step = min(most, max(16, next_power_of_2(sizes[product - 1])))
        return {f"rows{product}": rows, f"step{product}": step, f"warps{product}": warps}

    pairs = [
        DEFAULT,
        *((both, both) for both in SHAPES),
        *((one, SHAPES[0]) for one in SHAPES[1:]),
        *((one, SHAPES[1]) for one in MORE),
        *((SHAPES[0], one) for one in (*SHAPES[1:], *MORE)),
    ]
    yield from (shape(1, *first) | shape(2, *second) for first, second in dict.fromkeys(pairs))


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds on Hopper, where both products were timed; None elsewhere. Every entry reads the weights of its expert."""
    if "wgmma" not in target.features or not target.bandwidth_gbs:
        return None
    m, top_k, h, i = problem.integers("m", "top_k", "h", "i")
    read = 3 * m * top_k * h * i * ITEM_BYTES[problem.text("x")]
    return LAUNCHES + read / (READS * target.bandwidth_gbs * 1e3)


def workspace(problem: Problem, config: Config) -> Workspace:
    """silu(gate) · up of every entry."""
    m, top_k, i = problem.integers("m", "top_k", "i")
    size = m * top_k * i * ITEM_BYTES[problem.text("x")]
    return Workspace(_chain.aligned(size))


def aot(target: Target) -> list[AotCase]:
    """Both launches, plain and with all that may follow the products."""
    sizes = dict.fromkeys(("top_k", "experts", "hidden", "inner"), "i32")
    tensors = dict.fromkeys(("x", "w13", "w2", "bias", "activations", "out"), "*bf16")
    types = {**tensors, "ids": "*i32", "weights": "*fp32", "alpha": "fp32", "limit": "fp32", **sizes}
    options = {"num_warps": 4}
    cases = []
    for function, name, flags in (
        (gate_and_up_kernel, "gate_and_up", {"BIAS": False, "CLAMP": False}),
        (gate_and_up_kernel, "gate_and_up_bias_clamp", {"BIAS": True, "CLAMP": True}),
        (down_kernel, "down", {"BIAS": False}),
    ):
        constants = {"ROWS": 4, "STEP": 512, **flags, **overlap_on(target)}
        cases.append(AotCase(name, function, types, constants, options, ("hidden", "inner")))
    return cases


KERNEL = Kernel(
    op="moe",
    name="moe_few_tokens_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="a few tokens: a product per token and expert, then one per token over all of its experts; weights to registers, no tensor cores",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    estimate=estimate,
    layouts=("dense_v1",),
    examples=(
        "m=1,top_k=3,e=4,h=67,i=35,x=fp32,w=fp32",
        "m=2,top_k=2,e=16,h=136,i=72,x=fp16,w=fp16,epilogue=w13_bias+w2_bias+clamp",
        "m=3,top_k=1,e=12,h=600,i=520",
        "m=1,top_k=4,e=2,h=64,i=96,epilogue=w2_bias",
    ),
    waits=True,
    triggers=True,
    priority=52,
)
