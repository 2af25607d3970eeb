"""SwiGLU's gate with quantized output, the input of a down projection with 8-bit activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, Tensor
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Problem, problems
from gristmill.kernels import quantized_rows
from gristmill.kernels.activation import silu_and_mul
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.given_codes import scales_fit
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, format: str) -> None:
    """x [..., 2N], gate first -> codes [..., N] and scales float32 [rows, groups] of silu(x[..., :N]) · x[..., N:], written in place.

    format: fp8 (codes by the given scale [1, 1]), fp8_token, fp8_g128, int8_token, int8_g32 or int8_g128. The product is rounded to
    x's dtype, then quantized by the rules of activations: the bits of silu_and_mul, quantized.
    """
    quantized_rows.quantize_into(silu_and_mul.reference(x), codes, scales, format)


def inputs(problem: Problem, seed: int, device: str) -> list[object]:
    """Random arguments, those of silu_and_mul, and codes and scales to write."""
    return [*silu_and_mul.inputs(problem, seed, device), *quantized_rows.empty(Draw(problem, seed, device))]


def cost(problem: Problem) -> Cost:
    """Both halves read once, codes and scales written."""
    m, n, item = *problem.integers("m", "n"), ITEM_BYTES[problem.text("x")]
    return Cost(bytes=2 * m * n * item + quantized_rows.written_bytes(problem), flops=8 * m * n, unit="fp32")


def error(
    problem: Problem,
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, str],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Of the codes and scales (`quantized_rows.error`)."""
    return quantized_rows.error(problem, silu_and_mul.reference(arguments[0]), *outputs)


OP = Op(
    name="silu_and_mul_quant",
    family="activation",
    summary="silu(gate) · up of the two halves of each row, to 8-bit codes and scales",
    axes=quantized_rows.AXES,
    arguments=(Tensor("x", "... 2*n", strides=ROWS), *quantized_rows.ARGUMENTS),
    rules=(scales_fit,),
    check=quantized_rows.misfit,
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=quantized_rows.tolerance,
    error=error,
    bucket="m",
    examples=problems(
        """
        m=0,n=64,x=fp32  m=1,n=1,x=fp32,format=fp8  m=7,n=257,format=fp8_g128  m=33,n=768,x=fp16
        m=5,n=4097,q=int8,format=int8_token  m=257,n=65,x=fp32,q=int8,format=int8_g32
        m=3,n=300,q=int8,format=int8_g128  m=9,n=1031,format=fp8
        """
    ),
    bench=problems(
        "m=1,n=14336  m=64,n=14336,format=fp8_g128  m=1024,n=14336  m=64,n=14336,q=int8,format=int8_token"
    ),
)
