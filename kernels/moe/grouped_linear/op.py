"""Grouped linear: rows sorted by expert, each times its own expert's weight, dense or quantized, and its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import Scalar, Tensor, Weight
from gristmill.kernel_registry.op import VERIFIED_ROWS, Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.given_codes import activations
from gristmill.kernels.linear.op import (
    as_quant,
    gated,
    gated_error,
    pack,
    worst_column,
)
from gristmill.kernels.linear.op import check as fits
from gristmill.kernels.moe import _rows
from gristmill.kernels.moe._clamped import ALPHA, INPUT_LIMIT, LIMIT, clamped, clamped_error
from gristmill.kernels.moe.permute.op import reference as permute
from gristmill.kernels.quantized_inputs import random_weight
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

    from gristmill.kernels.linear.op import WeightLike

EPILOGUE = ("bias", "silu_mul", "clamp")


def reference(
    x: torch.Tensor,
    weight: WeightLike,
    expert_offsets: torch.Tensor,
    permutation: torch.Tensor | None = None,
    top_k: int = 1,
    silu_mul: bool = False,
    n: int = 0,
    bias: torch.Tensor | None = None,
    clamp: bool = False,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """x, a QuantTensor [E, N, K] (or one dense tensor, or a list of it), expert_offsets int32 [E + 1] -> [P, N or N / 2].

    Row p of expert e (expert_offsets[e] <= p < expert_offsets[e + 1]) is x[p] · W[e]ᵀ; with permutation int32 [P] it is
    x[permutation[p] // top_k] · W[e]ᵀ, so that x needs no gathering. bias [E, N], in x's dtype: bias[e] is added.
    silu_mul: then silu(first N / 2 columns) · the others. clamp, with silu_mul: instead g · sigmoid(alpha · g) · (u + 1), where
    g = min(gate, limit) and u = clamp(up, -limit, limit). float32 inside, rounded once to x's dtype. Rows past those of the last
    expert are 0, and their entries in permutation are not read. A scheme with an activation part quantizes x first, by that format's
    rule, a row at a time: nvfp4 has a multiplier for each row. Reads the offsets on the host.
    """
    import torch

    weight = as_quant(weight)
    offsets = expert_offsets.tolist()
    source = torch.arange(x.shape[0], device=x.device) if permutation is None else permutation.long() // top_k
    rows = activations(x[source[: offsets[-1]]], weight.scheme.activation, by_row=True)
    out = torch.zeros(source.shape[0], weight.n, dtype=torch.float32, device=x.device)
    for e, expert in enumerate(weight.experts()):
        part = slice(offsets[e], offsets[e + 1])
        if part.start < part.stop:
            y = rows[part] @ expert.dequantize().T
            out[part] = y if bias is None else y + bias[e].float()
    if silu_mul:
        out = clamped(out, alpha, limit) if clamp else gated(out)
    return out.to(x.dtype)


def check(problem: Problem) -> str | None:
    """Why the axes of `problem` are inconsistent; None if they are not."""
    flags = problem.flags("epilogue")
    return (
        clamp_rule("silu_mul" in flags, "clamp" in flags) or _rows.misfit(problem.text("w")) or fits(problem)
    )


def clamp_rule(silu_mul: bool, clamp: bool) -> str | None:
    """Why the flags of the activation do not go together; None if they do."""
    return "clamp limits the gate and up of silu_mul, which is off" if clamp and not silu_mul else None


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Experts with very different numbers of rows (the second has none), and rows behind the last expert's."""
    draw, (m, e, n, k) = Draw(problem, seed, device), problem.integers(*"menk")
    gather, flags = problem.integer("gather"), problem.flags("epilogue")
    offsets, permutation, _ = permute(draw.experts(m, 1, power=2, foreign=0.04), e)
    (x,) = draw.stored(draw.rows(cdiv(m, gather) if gather else m, k, spread=0.5))
    places = permutation.to(device) if gather else None
    arguments = [
        x,
        random_weight(draw, e, n, k),
        offsets.to(device),
        places,
        gather or 1,
        "silu_mul" in flags,
        n,
    ]
    bias = draw.stored(draw.normal(e, n))[0] if "bias" in flags else None
    return [*arguments, bias, "clamp" in flags, ALPHA, INPUT_LIMIT]


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """As for linear, with the weight and the bias of the expert of each row: |Δyₙ| / (‖x‖·‖wₑₙ‖/√K + |bₑₙ|), RMS over rows, the
    worst column."""
    import torch

    x, weight, offsets, permutation, top_k, silu_mul, _, bias, clamp, alpha, limit = arguments
    out, ref = outputs[0].double(), references[0].double()
    if out.numel() == 0:
        return 0.0
    rows = (x if permutation is None else x[permutation.long() // top_k]).double()
    weight, ends = as_quant(weight), offsets.tolist()
    if not torch.equal(out[ends[-1] :], ref[ends[-1] :]):
        return float("inf")
    scale = torch.ones_like(ref)
    for e, expert in enumerate(weight.experts()):
        part = slice(ends[e], ends[e + 1])
        if ends[e] == ends[e + 1]:
            continue
        dense = expert.dequantize().double()
        size = rows[part].norm(dim=1, keepdim=True) * dense.norm(dim=1) / weight.k**0.5
        z = rows[part] @ dense.T
        if bias is not None:
            z, size = z + bias[e].double(), size + bias[e].double().abs()
        if clamp:
            size = clamped_error(z, size, alpha, limit)
        elif silu_mul:
            size = gated_error(z, size)
        scale[part] = size
    return worst_column(out, ref, scale)


def cost(problem: Problem) -> Cost:
    """x and the output once, and the weights of at most as many experts as there are rows."""
    m, e, n, k = problem.integers(*"menk")
    item, scheme = ITEM_BYTES[problem.text("x")], QuantScheme.parse(problem.text("w"))
    flags = problem.flags("epilogue")
    columns, bias = n // 2 if "silu_mul" in flags else n, n * item if "bias" in flags else 0
    unit = problem.text("x")
    if scheme.activation is not None:
        unit = "int8" if scheme.activation.startswith("int8") else "fp8"
    return Cost(
        bytes=m * (k + columns) * item + min(m, e) * (scheme.weight_bytes(n, k) + bias),
        flops=2 * m * n * k,
        unit=unit,
    )


def tolerance(problem: Problem) -> Tolerance:
    """Rounding of the output, and room for providers that round weights to the dtype of x; more over few rows.

    Few rows, of few experts, leave the RMS of the worst column far from the mean: exact sums of rounded weights reach 1.6 times the
    base over 129 rows, 2.5 times over 40, 3.1 times over 17 and 6.6 times in one. Places that gather the same row of x have
    the same rounding of weights in their sums: only rows of x count.
    """
    base = {"fp32": 3e-6, "fp16": 2.5e-4, "bf16": 2e-3}[problem.text("x")]
    rows = cdiv(problem.integer("m"), problem.integer("gather") or 1)
    return Tolerance("columns", base * (1 + 10 / max(1, rows) ** 0.5))


def shrink(problem: Problem) -> Problem:
    """At most 257 rows, 16 experts and a part of large weights with the same remainders."""
    n, k, e = problem.integers("n", "k", "e")
    n = n if n <= 768 else 512 + n % 256
    k = k if k <= 2048 else 1536 + k % 512
    return problem.with_values(m=min(problem.integer("m"), VERIFIED_ROWS), n=n, k=k, e=min(e, 16))


OP = Op(
    name="grouped_linear",
    family="moe",
    summary="rows sorted by expert times their expert's weight, and its epilogue",
    axes=(
        Axis("m", "int", "sorted rows (tokens times top_k)", dynamic=True),
        Axis("e", "int", "experts", minimum=1),
        Axis("n", "int", "rows of an expert's W (gate and up together for silu_mul)", minimum=1),
        Axis("k", "int", "columns of W", minimum=1),
        Axis("x", "dtype", "dtype of x and the output", default="bf16", choices=FLOATS),
        Axis(
            "w",
            "scheme",
            "how the weights are stored, and the format x is quantized to, if any",
            default="bf16",
        ),
        Axis("epilogue", "flags", "what follows the product", default="none", choices=EPILOGUE),
        Axis("gather", "int", "top_k when rows of x are taken by permutation, 0 when x is sorted", default=0),
        Axis("act_order", "bool", "columns belong to groups in any order (GPTQ's desc_act)", default=False),
    ),
    arguments=(
        Tensor("x", "rows k"),
        Weight("weight", "e n k"),
        Tensor("expert_offsets", "e+1", dtype="int32"),
        Tensor("permutation", "places", dtype="int32", optional=True),
        Scalar("top_k", "int", 1, minimum=1),
        Scalar("silu_mul", "bool", False),
        Scalar("n", "int", 0, states="n"),
        Tensor("bias", "e n", optional=True),
        Scalar("clamp", "bool", False),
        Scalar("alpha", "float", ALPHA, finite=True),
        Scalar("limit", "float", LIMIT, minimum=0.0, finite=True),
    ),
    returns=(Tensor("out", "m n//(1+silu_mul)"),),
    values={
        "m": "rows if permutation is None else places",
        "gather": "0 if permutation is None else top_k",
    },
    rules=(clamp_rule,),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    tolerance=tolerance,
    error=error,
    shrink=shrink,
    pack=pack,
    unplanned=frozenset({"dense_v1"}),
    bucket="m",
    last_bucket=32768,  # 4,096 tokens of eight experts each
    examples=problems(
        """
        m=0,e=3,n=16,k=32,x=bf16  m=1,e=1,n=1,k=1,x=fp32,w=fp32  m=33,e=5,n=34,k=67,x=bf16,gather=2
        m=50,e=4,n=48,k=96,x=fp32,w=fp32,epilogue=silu_mul,gather=3
        m=21,e=3,n=40,k=64,x=fp16,w=fp16,epilogue=silu_mul  m=19,e=4,n=33,k=256,x=bf16,w=int4_g128,gather=8
        m=9,e=3,n=34,k=96,x=fp32,w=int4_g32_zp,epilogue=silu_mul
        m=7,e=3,n=18,k=128,x=fp16,w=int4_g64,act_order=true  m=17,e=3,n=20,k=129,x=bf16,w=int8_ch
        m=11,e=3,n=150,k=130,x=bf16,w=fp8_block,epilogue=silu_mul  m=6,e=3,n=18,k=77,x=fp32,w=fp8
        m=9,e=4,n=34,k=96,x=bf16,w=mxfp4,gather=4  m=8,e=3,n=39,k=80,x=bf16,w=nvfp4
        m=5,e=2,n=17,k=64,x=fp16,w=mxfp8  m=12,e=4,n=33,k=64,w=mxfp4,epilogue=bias
        m=27,e=4,n=66,k=96,w=mxfp4,epilogue=bias+silu_mul+clamp,gather=3
        m=9,e=3,n=34,k=96,w=mxfp4.mxfp4,gather=2  m=8,e=3,n=40,k=80,x=fp32,w=nvfp4.nvfp4,epilogue=bias
        m=12,e=4,n=34,k=64,x=fp16,w=mxfp8.mxfp8,epilogue=silu_mul  m=9,e=3,n=36,k=96,w=mxfp4.mxfp8,epilogue=bias+silu_mul+clamp,gather=3
        m=11,e=3,n=150,k=144,w=fp8_block.fp8_g128
        m=10,e=3,n=34,k=40,x=fp32,w=fp32,epilogue=bias+silu_mul  m=8,e=2,n=30,k=33,x=fp16,w=fp16,epilogue=silu_mul+clamp
        """
    ),
    bench=problems(
        """
        m=8,e=128,n=1536,k=2048,epilogue=silu_mul  m=512,e=128,n=1536,k=2048,w=fp8_block,epilogue=silu_mul
        m=8,e=128,n=1536,k=2048,w=int4_g128,epilogue=silu_mul
        """
    ),
)
