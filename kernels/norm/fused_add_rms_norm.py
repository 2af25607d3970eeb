"""Residual addition and RMSNorm in one pass: residual += x in place, then y = RMSNorm(residual) · weight.

This is what a pre-norm decoder layer does between its blocks: the residual stream is stored in the model's dtype, and
the norm reads what was stored. So the sum is rounded to the dtype once, and normalised from the rounded value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.norm import rms_norm
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N], residual [..., N] (becomes x + residual, rounded to its dtype), weight [N] in x's dtype or float32 -> normed [..., N].

    The norm is computed in float32 from the stored sum and rounded once. The output may be x itself.
    """
    residual.copy_(x.float() + residual.float())
    return rms_norm.reference(residual, weight, eps)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments: rows of very different sizes, so that a wrong row or a wrong mean shows."""
    draw, (m, n) = Draw(problem, seed, device), problem.integers("m", "n")
    rows, weight = draw.stored(draw.rows(m, n), draw.rows(m, n)), 1 + 0.2 * draw.normal(n)
    return [*rows, rms_norm.stored_weight(problem, draw, weight), 1e-5]


def cost(problem: Problem) -> Cost:
    """x and the residual read once, the residual and the output written once, the weight read once."""
    m, n, item = problem.integer("m"), problem.integer("n"), ITEM_BYTES[problem.text("x")]
    return Cost(bytes=(4 * m * n + n) * item, flops=5 * m * n, unit="fp32")


OP = Op(
    name="fused_add_rms_norm",
    family="norm",
    summary="residual += x in place, then RMSNorm of the stored sum",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("x", "dtype", "dtype of x, residual and the output", default="bf16", choices=FLOATS),
        rms_norm.WEIGHT,
    ),
    arguments=(
        Tensor("x", "... n", strides=ROWS),
        Tensor("residual", "... n", strides=ROWS, mutable=True),
        Tensor("weight", "n", dtype="w"),
        Scalar("eps", "float", minimum=0),
    ),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    check=rms_norm.check,
    cost=cost,
    # One rounding step of the dtype beside the reference's own, for the sum and for the norm.
    tolerance=rms_norm.OP.tolerance,
    bucket="m",
    examples=rms_norm.OP.examples,
    bench=rms_norm.OP.bench,
)
