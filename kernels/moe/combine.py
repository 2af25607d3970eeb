"""Combine: each token's weighted sum of what its experts made, in a fixed order."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES, dtype_name, need, torch_dtype


def reference(y: Any, inverse: Any, weights: Any) -> Any:
    """y [P, H], inverse int32 [T * K], weights float32 [T, K] -> [T, H] in y's dtype.

    out[t] = sum over k = 0, 1, ... of weights[t, k] * y[inverse[t * K + k]], in float32, rounded once. A negative place
    (an expert of another rank) adds nothing.
    """
    import torch

    tokens, top_k = weights.shape
    out = torch.zeros(tokens, y.shape[1], dtype=torch.float32, device=y.device)
    if y.shape[0] == 0:
        return out.to(y.dtype)
    places = inverse.reshape(tokens, top_k).long()
    for k in range(top_k):
        here = places[:, k] >= 0
        term = weights[:, k, None] * y[places[:, k].clamp(min=0)].float()
        out = torch.where(here[:, None], out + term, out)
    return out.to(y.dtype)


def describe(y: Any, inverse: Any, weights: Any) -> dict[str, Any]:
    """Axis values of a call; ValueError or TypeError for arguments that do not fit."""
    need(y.dim() == 2 and y.shape[1] >= 1, f"combine: y must be [rows, hidden], got {tuple(y.shape)}")
    need(y.is_contiguous(), f"combine: y must be contiguous, got strides {y.stride()}")
    need(
        weights.dim() == 2 and weights.shape[1] >= 1,
        f"combine: weights must be [tokens, top_k], got {tuple(weights.shape)}",
    )
    if dtype_name(y.dtype) not in FLOATS:
        raise TypeError(f"combine: y must be {', '.join(FLOATS)}, got {y.dtype}")
    for name, t, dtype in (("inverse", inverse, "int32"), ("weights", weights, "fp32")):
        if dtype_name(t.dtype) != dtype:
            raise TypeError(f"combine: {name} must be {dtype}, got {t.dtype}")
        need(
            t.numel() == weights.numel(),
            f"combine: inverse {tuple(inverse.shape)} must have one place for each of weights "
            f"{tuple(weights.shape)}",
        )
        need(t.is_contiguous(), f"combine: {name} must be contiguous")
        need(t.device == y.device, f"combine: {name} is on {t.device}, y on {y.device}")
    return {"m": weights.shape[0], "top_k": weights.shape[1], "h": y.shape[1], "x": dtype_name(y.dtype)}


def guard(problem: Problem, y: Any, inverse: Any, weights: Any, out: Any) -> int:
    """Tokens of a planned call; ValueError if it is not one of `problem`. Places in `inverse` are trusted."""
    tokens, top_k = weights.shape
    h = problem.values[2][1]
    if (
        top_k != problem.values[1][1]
        or y.dim() != 2
        or y.shape[1] != h
        or out.shape != (tokens, h)
        or out.dtype != y.dtype
        or dtype_name(y.dtype) != problem.values[3][1]
        or not (y.is_contiguous() and out.is_contiguous())
        or inverse.numel() != weights.numel()
        or not (inverse.is_contiguous() and weights.is_contiguous())
        or dtype_name(inverse.dtype) != "int32"
        or dtype_name(weights.dtype) != "fp32"
    ):
        raise ValueError(
            f"combine planned for {problem}: got y {tuple(y.shape)} {y.dtype}, inverse {tuple(inverse.shape)} "
            f"{inverse.dtype}, weights {tuple(weights.shape)} {weights.dtype}, out {tuple(out.shape)}; all "
            "contiguous"
        )
    return int(tokens)


def like(y: Any, inverse: Any, weights: Any) -> tuple[tuple[Any, Any], ...]:
    """Shape and dtype of the output."""
    return (((weights.shape[0], y.shape[1]), y.dtype),)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """A real permutation of random ids, some of other ranks, and rows of very different sizes."""
    import torch

    from gristmill.kernels.moe.permute import reference as permute

    generator = torch.Generator().manual_seed(seed)
    m, k, h = problem.integer("m"), problem.integer("top_k"), problem.integer("h")
    inverse = permute(torch.randint(-1, 9, (m, k), generator=generator).to(torch.int32), 9)[2]
    y = torch.randn(m * k, h, generator=generator) * torch.exp(torch.randn(m * k, 1, generator=generator))
    weights = torch.rand(m, k, generator=generator) + 0.1
    return [y.to(torch_dtype(problem.text("x"))).to(device), inverse.to(device), weights.to(device)]


def cost(problem: Problem) -> Cost:
    """Every row read once, every token written once."""
    m, k, h = problem.integer("m"), problem.integer("top_k"), problem.integer("h")
    return Cost(
        bytes=m * (k + 1) * h * ITEM_BYTES[problem.text("x")] + 8 * m * k, flops=2 * m * k * h, unit="fp32"
    )


def tolerance(problem: Problem) -> Tolerance:
    """One rounding step of the output; float32 sums differ by whether products are rounded (fma)."""
    return Tolerance("scaled", {"fp32": 2e-6, "fp16": 4e-3, "bf16": 3e-2}[problem.text("x")])


OP = Op(
    name="combine",
    family="moe",
    summary="weighted sum of each token's expert rows",
    axes=(
        Axis("m", "int", "tokens", dynamic=True),
        Axis("top_k", "int", "experts a token", minimum=1),
        Axis("h", "int", "hidden size", minimum=1),
        Axis("x", "dtype", "dtype of y and the output", default="bf16", choices=FLOATS),
    ),
    arguments="Tensor y, Tensor inverse, Tensor weights",
    outputs=("out",),
    reference=reference,
    describe=describe,
    guard=guard,
    like=like,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    bucket="m",
    examples=(
        "m=0,top_k=2,h=16",
        "m=1,top_k=1,h=1,x=fp32",
        "m=7,top_k=3,h=257",
        "m=33,top_k=8,h=130,x=fp16",
        "m=5,top_k=2,h=1024,x=fp32",
    ),
    bench=("m=1,top_k=8,h=7168", "m=64,top_k=8,h=7168", "m=4096,top_k=8,h=7168"),
)
