"""Residual addition and RMSNorm in one pass: residual += x in place, then y = RMSNorm(residual) · weight.

This is what a pre-norm decoder layer does between its blocks: the residual stream is stored in the model's dtype, and
the norm reads what was stored. So the sum is rounded to the dtype once, and normalised from the rounded value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N], residual [..., N] (becomes x + residual, rounded to its dtype), weight [N] -> normed [..., N].

    The norm is computed in float32 from the stored sum and rounded once. The output may be x itself.
    """
    residual.copy_(x.float() + residual.float())
    wide = residual.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments: rows of very different sizes, so that a wrong row or a wrong mean shows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    m, n, dtype = problem.integer("m"), problem.integer("n"), torch_dtype(problem.text("x"))
    x, residual = (
        torch.randn(m, n, generator=generator, dtype=torch.float32)
        * torch.exp(torch.randn(m, 1, generator=generator, dtype=torch.float32))
        for _ in range(2)
    )
    weight = 1 + 0.2 * torch.randn(n, generator=generator, dtype=torch.float32)
    return [*(t.to(dtype).to(device) for t in (x, residual, weight)), 1e-5]


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
        Axis("x", "dtype", "dtype of x, residual, weight and the output", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("x", "... n", strides=ROWS),
        Tensor("residual", "... n", strides=ROWS, mutable=True),
        Tensor("weight", "n"),
        Scalar("eps", "float", minimum=0),
    ),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # One rounding step of the dtype beside the reference's own, for the sum and for the norm.
    tolerance=Tolerance.by_dtype("relative", fp32=4e-6, fp16=1.1e-3, bf16=8.5e-3),
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=1,x=fp32  m=7,n=257,x=bf16  m=33,n=768,x=fp16  m=5,n=4096,x=bf16
        m=257,n=256,x=fp32  m=2,n=16387,x=bf16
        """
    ),
    bench=("m=1,n=4096", "m=64,n=7168", "m=1024,n=7168", "m=16384,n=7168"),
)
