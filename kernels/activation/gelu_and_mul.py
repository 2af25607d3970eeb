"""GEGLU's gate: gelu(gate) · up, gate and up being the two halves of each row (Shazeer, "GLU Variants", 2020)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.activation import silu_and_mul
from gristmill.kernels.common import FLOATS, ITEM_BYTES

if TYPE_CHECKING:
    import torch

APPROXIMATE = ("none", "tanh")
TWICE_ROOT, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
"""(1 + tanh(z)) / 2 is the sigmoid of 2 z."""
LEAST_GATE = -5.0
"""Of test inputs: for less, the sum 1 + tanh(z) of the reference has few digits in float64 too, and no relative error is small."""


def reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x [..., 2N], gate first -> gelu(x[..., :N]) · x[..., N:], [..., N] in x's dtype.

    gelu(g) = g · Φ(g), Φ being the distribution function of the normal distribution; with approximate = tanh it is
    g / 2 · (1 + tanh(√(2/π) · (g + 0.044715 g³))) (Hendrycks and Gimpel, 2016; Gemma). Computed in float64, as both sums cancel for negative
    gates, and rounded once.
    """
    import torch

    gate, up = x.double().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | str]:
    """Random arguments, the gate wide enough to reach both flat ends of gelu."""
    x, n = silu_and_mul.inputs(problem, seed, device)[0], problem.integer("n")
    x[..., :n].clamp_(min=LEAST_GATE)
    return [x, problem.text("approximate")]


def cost(problem: Problem) -> Cost:
    """Both halves read once, the product written once."""
    m, n = problem.integers("m", "n")
    return Cost(bytes=3 * m * n * ITEM_BYTES[problem.text("x")], flops=10 * m * n, unit="fp32")


OP = Op(
    name="gelu_and_mul",
    family="activation",
    summary="gelu(gate) · up of the two halves of each row",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "length of gate, of up, and of an output row", minimum=1),
        Axis("x", "dtype", "dtype of x and the output", default="bf16", choices=FLOATS),
        Axis("approximate", "choice", "formula of gelu", default="none", choices=APPROXIMATE),
    ),
    arguments=(Tensor("x", "... 2*n", strides=ROWS), Scalar("approximate", "str", "none")),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # One rounding step of the output dtype beside the reference's own; in float32, what the exponential makes of the rounding of its argument.
    tolerance=Tolerance.by_dtype("relative", fp32=4e-6, fp16=1.1e-3, bf16=8.5e-3),
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=1,x=fp32,approximate=tanh  m=7,n=257,x=bf16,approximate=tanh  m=33,n=768,x=fp16
        m=3,n=4097,x=bf16  m=257,n=65,x=fp32  m=65,n=513,x=fp32,approximate=tanh
        """
    ),
    bench=("m=1,n=9216,approximate=tanh", "m=64,n=9216,approximate=tanh", "m=8192,n=9216,approximate=tanh"),
)
