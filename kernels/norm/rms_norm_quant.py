"""RMSNorm with quantized output, the input of a product with 8-bit activations; optionally residual += x in place first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels import quantized_rows
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.given_codes import scales_fit
from gristmill.kernels.norm import fused_add_rms_norm, rms_norm
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: str,
    normed: torch.Tensor | None = None,
) -> None:
    """x [..., N], weight [N] -> codes [..., N] and scales float32 [rows, groups] of RMSNorm(x) · weight, written in place.

    residual [..., N]: becomes x + residual, rounded to its dtype, which is normalized instead of x; None: x is. format: fp8 (codes
    by the given scale [1, 1]), fp8_token, fp8_g128, int8_token, int8_g32 or int8_g128. The norm is rounded to x's dtype, then
    quantized by the rules of activations: the bits of rms_norm or fused_add_rms_norm, quantized.

    normed [..., N]: gets the norm itself; it may be x if there is a residual. None: it is not written.
    """
    values = normalized(x, residual, weight, eps)
    quantized_rows.quantize_into(values, codes, scales, format)
    if normed is not None:
        normed.copy_(values)


def normalized(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """What is quantized, [..., N] in x's dtype."""
    if residual is None:
        return rms_norm.reference(x, weight, eps)
    return fused_add_rms_norm.reference(x, residual, weight, eps)


def inputs(problem: Problem, seed: int, device: str) -> list[object]:
    """Random arguments: rows of very different sizes, so that a wrong row or a wrong mean shows."""
    draw, (m, n) = Draw(problem, seed, device), problem.integers("m", "n")
    x, residual, weight = draw.stored(draw.rows(m, n), draw.rows(m, n), 1 + 0.2 * draw.normal(n))
    normed = x.new_zeros(m, n) if problem["normed"] else None
    return [x, residual if problem["residual"] else None, weight, 1e-5, *quantized_rows.empty(draw), normed]


def cost(problem: Problem) -> Cost:
    """x and the weight read, codes and scales written; the residual read and written."""
    m, n, item = *problem.integers("m", "n"), ITEM_BYTES[problem.text("x")]
    rows = m * (3 if problem["residual"] else 1) + 1
    rows += m * bool(problem["normed"])
    return Cost(bytes=rows * n * item + quantized_rows.written_bytes(problem), flops=7 * m * n, unit="fp32")


def error(
    problem: Problem,
    arguments: tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        float,
        torch.Tensor,
        torch.Tensor,
        str,
        torch.Tensor | None,
    ],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Of the codes and scales (`quantized_rows.error`); infinite if the residual differs, or the norm is another one than was quantized."""
    x, residual, weight, eps, *_ = arguments
    if residual is not None and not outputs[0].equal(references[0]):
        return float("inf")
    codes, scales, *normed = outputs[residual is not None :]
    values = normalized(x, None if residual is None else residual.clone(), weight, eps)
    worst = quantized_rows.error(problem, values, codes, scales)
    for own in normed if codes.numel() else ():
        off = ((own.double() - values.double()) / values.double().abs().clamp_min(1e-30)).abs()
        worst = max(
            worst,
            float(off.where(own != values, 0.0).max()),
            quantized_rows.error(problem, own, codes, scales),
        )
    return worst


OP = Op(
    name="rms_norm_quant",
    family="norm",
    summary="RMSNorm over the last dimension to 8-bit codes and scales; with a residual, residual += x in place first",
    axes=(
        *quantized_rows.AXES,
        Axis("residual", "bool", "whether x is added to a residual first", default=False),
        Axis("normed", "bool", "the norm itself is written too", default=False, opt_in=True),
    ),
    arguments=(
        Tensor("x", "... n", strides=ROWS),
        Tensor("residual", "... n", strides=ROWS, mutable=True, optional=True, required=True),
        Tensor("weight", "n"),
        Scalar("eps", "float", minimum=0),
        *quantized_rows.ARGUMENTS,
        Tensor("normed", "... n", strides=ROWS, mutable=True, optional=True),
    ),
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
        m=0,n=64,x=fp32  m=1,n=1,x=fp32,format=fp8  m=7,n=257,format=fp8_g128,residual=true  m=33,n=768,x=fp16
        m=5,n=4096,q=int8,format=int8_token,residual=true  m=257,n=96,x=fp32,q=int8,format=int8_g32
        m=3,n=300,q=int8,format=int8_g128  m=9,n=1031,format=fp8,residual=true
        m=7,n=257,format=fp8_g128,residual=true,normed=true  m=5,n=512,x=fp16,normed=true
        """
    ),
    bench=problems(
        """
        m=1,n=4096,residual=true  m=64,n=7168,format=fp8_g128,residual=true  m=1024,n=7168,residual=true
        m=64,n=4096,q=int8,format=int8_token,residual=true
        """
    ),
)
