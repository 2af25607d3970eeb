"""LayerNorm: y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension (Ba et al., 2016, arXiv:1607.06450).

With a residual it is added first, in place, as `fused_add_rms_norm` does: residual += x, and the norm is of the stored sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., N], weight [N], bias [N] or None, residual [..., N] (becomes x + residual, rounded to its dtype) or None
    -> [..., N] in x's dtype; computed in float32 and rounded once. The output may be x itself, or the residual.

    The variance is the mean of the squares of x − mean(x), not the difference of two sums, which would cancel.
    """
    if residual is not None:
        residual.copy_(x.float() + residual.float())
    values = (x if residual is None else residual).float()
    centred = values - values.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = centred * scale * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | float | None]:
    """Random arguments: rows of very different sizes, with means of some times their size, so that a wrong row, mean or variance shows."""
    draw, (m, n) = Draw(problem, seed, device), problem.integers("m", "n")
    rows = draw.rows(m, n)
    rows += 2 * draw.normal(m, 1) * rows.square().mean(-1, keepdim=True).sqrt()
    x, weight, bias = draw.stored(rows, 1 + 0.1 * draw.normal(n), 0.3 * draw.normal(n))
    added = draw.stored(draw.rows(m, n))[0] if problem["residual"] else None
    return [x, weight, bias if problem["bias"] else None, 1e-5, added]


def cost(problem: Problem) -> Cost:
    """x read once, y written once, the residual read and written once, weight and bias read once."""
    m, n, item = problem.integer("m"), problem.integer("n"), ITEM_BYTES[problem.text("x")]
    rows = (4 if problem["residual"] else 2) * m
    return Cost(bytes=(rows + (2 if problem["bias"] else 1)) * n * item, flops=7 * m * n, unit="fp32")


OP = Op(
    name="layer_norm",
    family="norm",
    summary="LayerNorm over the last dimension, of x or of residual += x",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("x", "dtype", "dtype of x, weight, bias and the output", default="bf16", choices=FLOATS),
        Axis("bias", "bool", "whether a bias is added", default=False),
        Axis("residual", "bool", "whether x is added to a residual first", default=False, opt_in=True),
    ),
    arguments=(
        Tensor("x", "... n", strides=ROWS),
        Tensor("weight", "n"),
        Tensor("bias", "n", optional=True),
        Scalar("eps", "float", 1e-5, minimum=0),
        Tensor("residual", "... n", strides=ROWS, optional=True, mutable=True),
    ),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # x − mean cancels: errors are relative to the row. One rounding step of the largest elements, some six times the RMS.
    tolerance=Tolerance.by_dtype("scaled", fp32=1e-5, fp16=6e-3, bf16=4e-2),
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=2,x=fp32,bias=true  m=7,n=257,x=bf16  m=33,n=768,x=fp16,bias=true  m=5,n=4096,x=bf16
        m=257,n=256,x=fp32,bias=true  m=2,n=16387,x=bf16,bias=true  m=3,n=1,x=fp32
        m=7,n=257,x=fp32,bias=true,residual=true  m=33,n=384,x=bf16,residual=true  m=2,n=16387,x=fp16,residual=true
        m=0,n=64,x=fp32,residual=true
        """
    ),
    bench=(
        "m=1,n=4096",
        "m=64,n=8192",
        "m=1024,n=8192",
        "m=16384,n=1024,bias=true",
        "m=512,n=768,bias=true,residual=true",
    ),
)
