"""Combine: the weighted sum of the expert outputs of each token, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.moe.permute.op import reference as permute
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
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
        is_local = places[:, k] >= 0
        term = weights[:, k, None] * y[places[:, k].clamp(min=0)].float()
        out = torch.where(is_local[:, None], out + term, out)
    return out.to(y.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """A real permutation of random ids, some of other ranks, and rows of very different sizes."""
    import torch

    draw, (m, k, h) = Draw(problem, seed, device), problem.integers("m", "top_k", "h")
    inverse = permute(torch.randint(-1, 9, (m, k), generator=draw.generator).to(torch.int32), 9)[2]
    y, weights = draw.rows(m * k, h), draw.uniform(m, k) + 0.1
    return [*draw.stored(y), inverse.to(device), weights.to(device)]


def cost(problem: Problem) -> Cost:
    """Every row read once, every token written once."""
    m, k, h = problem.integers("m", "top_k", "h")
    return Cost(
        bytes=m * (k + 1) * h * ITEM_BYTES[problem.text("x")] + 8 * m * k, flops=2 * m * k * h, unit="fp32"
    )


OP = Op(
    name="combine",
    family="moe",
    summary="weighted sum of each token's expert rows",
    axes=(
        Axis("m", "int", "tokens", dynamic=True),
        Axis("top_k", "int", "experts per token", minimum=1),
        Axis("h", "int", "hidden size", minimum=1),
        Axis("x", "dtype", "dtype of y and the output", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("y", "rows h"),
        Tensor("inverse", "(m*top_k)", dtype="int32"),
        Tensor("weights", "m top_k", dtype="fp32"),
    ),
    returns=(Tensor("out", "m h"),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # One rounding step of the output; float32 sums differ by whether products are rounded (fma).
    tolerance=Tolerance.by_dtype("scaled", fp32=2e-6, fp16=4e-3, bf16=3e-2),
    bucket="m",
    examples=problems(
        """
        m=0,top_k=2,h=16  m=1,top_k=1,h=1,x=fp32  m=7,top_k=3,h=257  m=33,top_k=8,h=130,x=fp16
        m=5,top_k=2,h=1024,x=fp32
        """
    ),
    bench=("m=1,top_k=8,h=7168", "m=64,top_k=8,h=7168", "m=4096,top_k=8,h=7168"),
)
