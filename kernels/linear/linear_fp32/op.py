"""Linear with a result in float32: y = x · Wᵀ (+ bias) of few columns, as the logits of a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import MATRIX, Tensor, WorkspaceArgument
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.linear.op import worst_column
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K], W [N, K] in x's dtype or float32, bias float32 [N] -> float32 [..., N].

    Products of 16-bit numbers are exact in float32, and sums are as good as sums in float32: nothing is rounded to 16 bits.
    """
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments; rows of x and of W have very different sizes, so that a wrong row shows."""
    draw, (m, n, k) = Draw(problem, seed, device), problem.integers(*"mnk")
    (x,), weight = draw.stored(draw.rows(m, k, spread=0.5)), draw.rows(n, k, spread=0.5) / k**0.5
    stored = weight.to(draw.device) if problem["w"] == "fp32" else draw.stored(weight)[0]
    return [x, stored, draw.normal(n).to(draw.device) if problem["bias"] else None, None]


def check(problem: Problem) -> str | None:
    """A weight in float32 is of another dtype than x only where x has 16 bits."""
    return "where x is fp32, w is x" if problem["x"] == problem["w"] else None


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K + |biasₙ|), RMS over the rows of x, of the worst column, as of `linear`."""
    x, weight, bias = arguments[:3]
    out, ref = (t.double().reshape(-1, t.shape[-1]) for t in (outputs[0], references[0]))
    if out.numel() == 0:
        return 0.0
    rows = x.double().reshape(-1, x.shape[-1]).norm(dim=1, keepdim=True)
    size = rows * weight.double().norm(dim=1) / weight.shape[1] ** 0.5
    return worst_column(out, ref, size if bias is None else size + bias.double().abs())


def cost(problem: Problem) -> Cost:
    """x, the weight and the bias read once, the output written once."""
    (m, n, k), item = problem.integers(*"mnk"), ITEM_BYTES[problem.text("x")]
    of_weight = 4 if problem["w"] == "fp32" else item
    moved = m * k * item + n * k * of_weight + 4 * m * n + (4 * n if problem["bias"] else 0)
    return Cost(
        bytes=moved, flops=2 * m * n * k, unit="fp32" if problem["w"] == "fp32" else problem.text("x")
    )


def tolerance(problem: Problem) -> Tolerance:
    """Sums in float32 in any order, as of `linear` in float32."""
    rows = max(1, problem.integer("m"))
    return Tolerance("columns", 4e-6 * (1 + 4 / rows**0.5 + 4 / rows))


OP = Op(
    name="linear_fp32",
    family="linear",
    summary="y = x W^T in float32, of x and W in 16 bits: logits of a router",
    axes=(
        Axis("m", "int", "rows of x (tokens)", dynamic=True),
        Axis("n", "int", "rows of W (experts)", minimum=1),
        Axis("k", "int", "columns of W (input features)", minimum=1),
        Axis("x", "dtype", "dtype of x", default="bf16", choices=FLOATS),
        Axis("w", "dtype", "dtype of W; x: that of x", default="x", choices=("x", "fp32")),
        Axis("bias", "bool", "whether there is a bias", default=False),
    ),
    arguments=(
        Tensor("x", "... k", strides=MATRIX),
        Tensor("weight", "n k", dtype="w"),
        Tensor("bias", "n", dtype="fp32", optional=True),
        WorkspaceArgument(),
    ),
    returns=(Tensor("out", "... n", dtype="fp32"),),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    tolerance=tolerance,
    error=error,
    bucket="m",
    examples=problems(
        """
        m=0,n=8,k=64  m=1,n=1,k=1,x=fp32  m=1,n=256,k=512  m=7,n=33,k=129,bias=true  m=3,n=40,k=67,x=fp16
        m=19,n=64,k=320,w=fp32  m=5,n=16,k=96,x=fp16,w=fp32,bias=true  m=70,n=130,k=200,x=bf16  m=33,n=24,k=256,x=fp32
        """
    ),
    bench=problems(
        """
        m=1,n=256,k=7168  m=16,n=256,k=7168  m=64,n=256,k=7168  m=4096,n=256,k=7168  m=16,n=128,k=2048  m=16,n=8,k=4096
        """
    ),
)
