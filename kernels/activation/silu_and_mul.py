"""SwiGLU's gate: silu(gate) · up, gate and up being the two halves of each row (Shazeer, "GLU Variants", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import ROWS, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2N], gate first -> silu(x[..., :N]) · x[..., N:], [..., N] in x's dtype.

    silu(g) = g / (1 + e⁻ᵍ). Computed in float32 and rounded once, where a model's own code may round silu too.
    """
    import torch

    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments, the gate wide enough to reach both flat ends of silu."""
    draw, (m, n) = Draw(problem, seed, device), problem.integers("m", "n")
    x = draw.normal(m, 2 * n)
    x[:, :n] *= 4
    return draw.stored(x)


def cost(problem: Problem) -> Cost:
    """Both halves read once, the product written once."""
    m, n = problem.integers("m", "n")
    return Cost(bytes=3 * m * n * ITEM_BYTES[problem.text("x")], flops=5 * m * n, unit="fp32")


OP = Op(
    name="silu_and_mul",
    family="activation",
    summary="silu(gate) · up of the two halves of each row",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "length of gate, of up, and of an output row", minimum=1),
        Axis("x", "dtype", "dtype of x and the output", default="bf16", choices=FLOATS),
    ),
    arguments=(Tensor("x", "... 2*n", strides=ROWS),),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # One rounding step of the output dtype beside the reference's own.
    tolerance=Tolerance.by_dtype("relative", fp32=4e-6, fp16=1.1e-3, bf16=8.5e-3),
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=1,x=fp32  m=7,n=257,x=bf16  m=33,n=768,x=fp16  m=3,n=4097,x=bf16
        m=257,n=65,x=fp32
        """
    ),
    bench=("m=1,n=14336", "m=64,n=14336", "m=1024,n=14336", "m=8192,n=18432"),
)
