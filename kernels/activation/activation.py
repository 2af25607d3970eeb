"""An activation of every value: gelu, silu, relu or relu², for feed-forward blocks without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.activation.gelu_and_mul import LEAST_GATE
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

FUNCTIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2")


def reference(x: torch.Tensor, function: str) -> torch.Tensor:
    """x [..., N] -> f(x) [..., N] in x's dtype, computed in float64, as gelu cancels for negative values, and rounded once.

    gelu(x) = x · Φ(x), Φ being the distribution function of the normal distribution (Hendrycks and Gimpel, 2016; BERT); gelu_tanh is
    x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Gemma); silu(x) = x / (1 + e^-x); relu2(x) = max(x, 0)² (So et al., 2021: Primer).
    """
    import torch

    f, values = torch.nn.functional, x.double()
    if function == "relu2":
        return f.relu(values).square().to(x.dtype)
    if function.startswith("gelu"):
        return f.gelu(values, approximate="tanh" if function == "gelu_tanh" else "none").to(x.dtype)
    return (f.silu(values) if function == "silu" else f.relu(values)).to(x.dtype)


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | str]:
    """Random arguments, wide enough to reach both flat ends."""
    draw, (m, n) = Draw(problem, seed, device), problem.integers("m", "n")
    return [*draw.stored((3 * draw.normal(m, n)).clamp_(min=LEAST_GATE)), problem.text("function")]


def cost(problem: Problem) -> Cost:
    """x read once, the result written once."""
    m, n = problem.integers("m", "n")
    return Cost(bytes=2 * m * n * ITEM_BYTES[problem.text("x")], flops=10 * m * n, unit="fp32")


OP = Op(
    name="activation",
    family="activation",
    summary="gelu, silu, relu or relu² of every value",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "length of a row", minimum=1),
        Axis("x", "dtype", "dtype of x and the output", default="bf16", choices=FLOATS),
        Axis("function", "choice", "the activation", default="gelu", choices=FUNCTIONS),
    ),
    arguments=(Tensor("x", "... n", strides=ROWS), Scalar("function", "str")),
    returns=(Tensor("out", "... n", strides=ROWS),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # One rounding step of the output dtype beside the reference's own; in float32, what the exponential makes of the rounding of its argument.
    tolerance=Tolerance.by_dtype("relative", fp32=4e-6, fp16=1.1e-3, bf16=8.5e-3),
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=1,x=fp32,function=gelu_tanh  m=7,n=257,x=bf16  m=33,n=768,x=fp16,function=silu
        m=3,n=4097,x=bf16,function=relu2  m=257,n=65,x=fp32  m=5,n=31,x=fp16,function=relu  m=65,n=513,x=fp32,function=gelu_tanh
        """
    ),
    bench=("m=1,n=3072", "m=64,n=3072", "m=4096,n=3072", "m=4096,n=16384,function=relu2"),
)
