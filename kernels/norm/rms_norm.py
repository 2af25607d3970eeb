"""RMSNorm: y = x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N], weight [N] in x's dtype or float32 -> [..., N] in x's dtype; computed in float32 and rounded once.

    A float32 weight is for models whose norms multiply by 1 + w (Gemma), which 16 bits do not hold.
    """
    values = x.float()
    scale = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (values * scale * weight.float()).to(x.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments: rows of very different sizes, so that a wrong row or a wrong mean shows."""
    draw, (m, n) = Draw(problem, seed, device), problem.integers("m", "n")
    weight = 1 + 0.2 * draw.normal(n)
    return [*draw.stored(draw.rows(m, n)), stored_weight(problem, draw, weight), 1e-5]


def stored_weight(problem: Problem, draw: Draw, weight: torch.Tensor) -> torch.Tensor:
    """The weight of a norm in the dtype of axis w."""
    return weight.float().to(draw.device) if problem["w"] == "fp32" else draw.stored(weight)[0]


def cost(problem: Problem) -> Cost:
    """x read once, y written once, the weight read once."""
    m, n, item = problem.integer("m"), problem.integer("n"), ITEM_BYTES[problem.text("x")]
    return Cost(bytes=(2 * m * n + n) * item, flops=4 * m * n, unit="fp32")


WEIGHT = Axis(
    "w", "dtype", "dtype of the weight; x: that of x", default="x", choices=("x", "fp32"), opt_in=True
)


def check(problem: Problem) -> str | None:
    """A weight in float32 is of another dtype than x only where x has 16 bits."""
    return "where x is fp32, w is x" if problem["x"] == problem["w"] else None


OP = Op(
    name="rms_norm",
    family="norm",
    summary="RMSNorm over the last dimension",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("x", "dtype", "dtype of x and the output", default="bf16", choices=FLOATS),
        WEIGHT,
    ),
    arguments=(
        Tensor("x", "... n", strides=ROWS),
        Tensor("weight", "n", dtype="w"),
        Scalar("eps", "float", minimum=0),
    ),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    # One rounding step of the output dtype beside the reference's own.
    tolerance=Tolerance.by_dtype("relative", fp32=4e-6, fp16=1.1e-3, bf16=8.5e-3),
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=1,x=fp32  m=7,n=257,x=bf16  m=33,n=768,x=fp16  m=5,n=4096,x=bf16
        m=257,n=256,x=fp32  m=2,n=16387,x=bf16  m=7,n=257,x=bf16,w=fp32  m=33,n=768,x=fp16,w=fp32
        """
    ),
    bench=("m=1,n=4096", "m=64,n=7168", "m=1024,n=7168", "m=16384,n=7168"),
)
