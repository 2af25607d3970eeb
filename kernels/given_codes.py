"""x as codes and scales that the layer before has made, arguments of products with quantized activations (`quantized_rows` has the formats)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, STRIDED, Tensor
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.common import dtype_name

if TYPE_CHECKING:
    import torch

GROUPS = {"fp8": 0, "fp8_token": 0, "fp8_g128": 128, "int8_token": 0, "int8_g32": 32, "int8_g128": 128}
"""Columns that share a scale; 0: all of them."""
ARGUMENTS = (
    Tensor("codes", "... k", dtype="", strides=ROWS, optional=True),
    Tensor("scales", "rows groups", dtype="fp32", strides=STRIDED, optional=True),
)
"""Codes and scales of x as arguments of an operation that quantizes it otherwise, in the activation format of its weight."""


def scales_fit(codes: torch.Tensor, n: int, format: str, rows: int, groups: int) -> str | None:
    """The scales have the shape of the format."""
    expected = (1, 1) if format == "fp8" else (codes.numel() // n, cdiv(n, GROUPS[format] or n))
    if (rows, groups) == expected:
        return None
    return f"scales of {format} must be {list(expected)}, got {[rows, groups]}"


def fits(
    codes: torch.Tensor | None, scales: torch.Tensor | None, w: str, k: int, rows: int, groups: int
) -> str | None:
    """Given codes and scales are those of the weight's activation format."""
    if codes is None and scales is None:
        return None
    if codes is None or scales is None:
        return "codes and scales are given together"
    form = _activation_of(w)
    if form not in GROUPS:
        return f"codes are of {', '.join(GROUPS)}, and a weight in {w} takes {form or 'floats'}"
    expected = "int8" if form.startswith("int8") else "fp8"
    if dtype_name(codes.dtype) != expected:
        return f"codes of {form} must be {expected}, got {codes.dtype}"
    return scales_fit(codes, k, form, rows, groups)


@cache
def _activation_of(scheme: str) -> str | None:
    return QuantScheme.parse(scheme).activation


def misfit(problem: Problem) -> str | None:
    """Why x of a problem cannot be given as codes; None if it can, or is not."""
    form = _activation_of(problem.text("w"))
    if not problem["codes"] or form in GROUPS:
        return None
    return f"codes are of {', '.join(GROUPS)}, and a weight in {problem.text('w')} takes {form or 'floats'}"


def codes_of(x: torch.Tensor, form: str) -> list[torch.Tensor]:
    """Codes and scales of x, for `ARGUMENTS`."""
    from gristmill.quant.activations import quantize_activation

    quantized = quantize_activation(x, form)
    k = x.shape[-1]
    shape = (1, 1) if form == "fp8" else (x.numel() // k, cdiv(k, GROUPS[form] or k))
    return [quantized.values, quantized.scales.reshape(shape)]


def dequantized(codes: torch.Tensor, scales: torch.Tensor, form: str) -> torch.Tensor:
    """The float32 values [..., K] of given codes."""
    from gristmill.quant.activations import QuantAct

    shape = (1,) if form == "fp8" else (*codes.shape[:-1], scales.shape[-1])
    return QuantAct(form, codes, scales.reshape(shape), codes.shape[-1]).dequantize()


def activations(
    x: torch.Tensor,
    form: str | None,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    by_row: bool = False,
) -> torch.Tensor:
    """The float32 values that are multiplied: x, as quantized in a format, `by_row` as in `quantize_activation`, or the given codes of it."""
    if form is None:
        return x.float()
    if codes is not None and scales is not None:
        return dequantized(codes, scales, form)
    from gristmill.quant.activations import quantize_activation

    return quantize_activation(x, form, by_row=by_row).dequantize()
