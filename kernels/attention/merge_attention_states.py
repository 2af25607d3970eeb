"""Merging two partial attentions over disjoint keys by their log-sum-exps.

With weights eᵃ and eᵇ for natural log-sum-exps a and b: out = (eᵃ·A + eᵇ·B) / (eᵃ + eᵇ), lse = ln(eᵃ + eᵇ). This is
the online softmax of FlashAttention (Dao et al., 2022) as FlashInfer (Ye et al., 2025) states it for split keys.
"""

from __future__ import annotations

import math
from typing import Any

from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES, dtype_name, need, torch_dtype

NAME = "merge_attention_states"


def reference(a: Any, a_lse: Any, b: Any, b_lse: Any) -> tuple[Any, Any]:
    """a, b [T, H, D]; a_lse, b_lse float32 [T, H], natural logarithms -> out [T, H, D] in a's dtype, lse float32 [T, H].

    A partial whose lse is −inf saw no key: it adds nothing, whatever its values are, NaN included. Both −inf: out is
    zero, lse −inf. float32 inside, rounded once.
    """
    import torch

    most = torch.maximum(a_lse, b_lse)
    most = torch.where(most == -math.inf, 0.0, most)
    weights = [torch.exp(lse - most) for lse in (a_lse, b_lse)]
    total = weights[0] + weights[1]
    terms = [
        torch.where((lse == -math.inf)[..., None], 0.0, part.float() * weight[..., None])
        for part, lse, weight in zip((a, b), (a_lse, b_lse), weights, strict=True)
    ]
    empty = total == 0
    out = (terms[0] + terms[1]) / torch.where(empty, 1.0, total)[..., None]
    return out.to(a.dtype), most + torch.log(total)


def describe(a: Any, a_lse: Any, b: Any, b_lse: Any) -> dict[str, Any]:
    """Axis values of a call; ValueError or TypeError for arguments that do not fit."""
    need(a.dim() == 3, f"{NAME}: a must be [tokens, heads, head size], got {tuple(a.shape)}")
    need(b.shape == a.shape, f"{NAME}: b must have a's shape {tuple(a.shape)}, got {tuple(b.shape)}")
    for name, tensor, dtype in (
        ("b", b, dtype_name(a.dtype)),
        ("a_lse", a_lse, "fp32"),
        ("b_lse", b_lse, "fp32"),
    ):
        if dtype_name(tensor.dtype) != dtype:
            raise TypeError(f"{NAME}: {name} must be {dtype}, got {tensor.dtype}")
        need(tensor.device == a.device, f"{NAME}: {name} is on {tensor.device}, a on {a.device}")
        need(
            name == "b" or tensor.shape == a.shape[:2],
            f"{NAME}: {name} must be {tuple(a.shape[:2])}, got {tuple(tensor.shape)}",
        )
    for name, tensor in (("a", a), ("b", b), ("a_lse", a_lse), ("b_lse", b_lse)):
        need(tensor.is_contiguous(), f"{NAME}: {name} must be contiguous, got strides {tensor.stride()}")
    return {"t": a.shape[0], "h": a.shape[1], "d": a.shape[2], "x": dtype_name(a.dtype)}


def guard(problem: Problem, a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any, lse: Any) -> int:
    """Tokens of a planned call; ValueError if it is not one of `problem`."""
    shape, kind = a.shape, a.dtype
    (_, _), (_, h), (_, d), (_, x) = problem.values
    if (
        len(shape) != 3
        or shape[1] != h
        or shape[2] != d
        or b.shape != shape
        or out.shape != shape
        or b.dtype != kind
        or out.dtype != kind
        or dtype_name(kind) != x
    ):
        raise ValueError(
            f"{NAME} planned for {problem}: got a {tuple(shape)} {kind}, b {tuple(b.shape)} {b.dtype}, "
            f"out {tuple(out.shape)} {out.dtype}"
        )
    for tensor in (a_lse, b_lse, lse):
        if tensor.shape != shape[:2] or dtype_name(tensor.dtype) != "fp32" or not tensor.is_contiguous():
            raise ValueError(
                f"{NAME}: every lse must be a contiguous fp32 {tuple(shape[:2])}, got {tuple(tensor.shape)} "
                f"{tensor.dtype} with strides {tensor.stride()}"
            )
    need(
        a.is_contiguous() and b.is_contiguous() and out.is_contiguous(),
        f"{NAME}: a, b and out must be contiguous",
    )
    return int(shape[0])


def like(a: Any, a_lse: Any, b: Any, b_lse: Any) -> tuple[tuple[Any, Any], ...]:
    """Shapes and dtypes of the merged output and its lse."""
    return ((a.shape, a.dtype), (a_lse.shape, a_lse.dtype))


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random partials: close and far log-sum-exps, and rows in which one or both partials are empty and hold NaN."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    t, h, d = (problem.integer(axis) for axis in ("t", "h", "d"))
    a, b = (torch.randn(t, h, d, generator=generator) for _ in range(2))
    a_lse = 5 * torch.randn(t, h, generator=generator)
    b_lse = a_lse + torch.where(torch.rand(t, h, generator=generator) < 0.2, 40.0, 2.0) * torch.randn(
        t, h, generator=generator
    )
    kind = torch.randint(0, 8, (t, h), generator=generator)
    for part, lse, kinds in ((a, a_lse, (0, 2)), (b, b_lse, (1, 2))):
        empty = (kind == kinds[0]) | (kind == kinds[1])
        lse[empty] = -math.inf
        part[empty] = math.nan
    dtype = torch_dtype(problem.text("x"))
    return [a.to(dtype).to(device), a_lse.to(device), b.to(dtype).to(device), b_lse.to(device)]


def cost(problem: Problem) -> Cost:
    """Both partials read once, the output written once, and three log-sum-exps a row."""
    t, h, d = (problem.integer(axis) for axis in ("t", "h", "d"))
    return Cost(bytes=t * h * (3 * d * ITEM_BYTES[problem.text("x")] + 12), flops=4 * t * h * d, unit="fp32")


LSE_LIMIT = 4e-6


def tolerance(problem: Problem) -> Tolerance:
    """One rounding step of the dtype, of the sum of the weighted magnitudes."""
    return Tolerance("merge", {"fp32": 4e-6, "fp16": 1.1e-3, "bf16": 8.5e-3}[problem.text("x")])


def error(problem: Problem, arguments: Any, outputs: Any, references: Any) -> float:
    """Largest |Δ| of an output element / (weight·|a| + weight·|b|); |Δ| of lse / max(1, |lse|) counted in its own limit."""
    import torch

    a, a_lse, b, b_lse = (tensor.double() for tensor in arguments)
    if not a.numel():
        return 0.0
    lse, found = references[1].double(), outputs[1].double()
    size = sum(
        torch.where(
            (part_lse == -math.inf)[..., None], 0.0, part.abs() * torch.exp(part_lse - lse)[..., None]
        )
        for part, part_lse in ((a, a_lse), (b, b_lse))
    )
    delta = (outputs[0].double() - references[0].double()).abs()
    worst = torch.where(delta == 0, 0.0, delta / (size + 1e-30)).max()
    gap = torch.where(found == lse, 0.0, (found - lse).abs() / lse.abs().clamp_min(1)).max()
    figure = max(float(worst), float(gap) / LSE_LIMIT * tolerance(problem).limit)
    return math.inf if math.isnan(figure) else figure


OP = Op(
    name=NAME,
    family="attention",
    summary="two partial attentions into one, by log-sum-exp",
    axes=(
        Axis("t", "int", "tokens", dynamic=True),
        Axis("h", "int", "heads", minimum=1),
        Axis("d", "int", "elements of a head", minimum=1),
        Axis("x", "dtype", "dtype of the partials and the output", default="bf16", choices=FLOATS),
    ),
    arguments="Tensor a, Tensor a_lse, Tensor b, Tensor b_lse",
    outputs=("out", "lse"),
    reference=reference,
    describe=describe,
    guard=guard,
    like=like,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    error=error,
    bucket="t",
    examples=(
        "t=0,h=2,d=8,x=fp32",
        "t=1,h=1,d=1,x=fp32",
        "t=7,h=3,d=33",
        "t=33,h=5,d=64,x=fp16",
        "t=17,h=8,d=128",
        "t=65,h=4,d=96,x=fp32",
    ),
    bench=("t=1,h=32,d=128", "t=64,h=32,d=128", "t=4096,h=32,d=128", "t=1024,h=128,d=512"),
)
