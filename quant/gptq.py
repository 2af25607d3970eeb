"""GPTQ: rounding that compensates for its own errors (Frantar, Ashkboos, Hoefler and Alistarh, 2022, arXiv:2210.17323).

Columns are rounded one after another; the error of a column is distributed over the columns that follow, in the proportions that
minimize the loss for the second moments of the inputs, H = E[x xᵀ]: with U the upper Cholesky factor of (H + damping)⁻¹, rounding
column i with error e changes column j > i by -e U[i, j] / U[i, i].

Scales and zero points are those of round to nearest on the original weight and stay fixed (``static groups``). Columns can
therefore be processed in order of importance (act-order) without reordering the result, and every scheme is supported: only the
codes differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from gristmill.quant import numeric
from gristmill.quant.tensor import QuantTensor, scales_to_float32

SHRINKS: Final = tuple(1 - 0.025 * i for i in range(17))
"""Factors of a scale in the search: from 1 down to 0.6."""
BLOCK: Final = 128
"""Columns whose errors are collected before they are applied to all later columns: one matrix product per block."""


@dataclass(frozen=True, eq=False)
class Factor:
    """The factorization of a Hessian for `gptq`: `upper`, the Cholesky factor of its damped inverse, float32 [K, K], and the `order` of columns."""

    upper: Tensor
    order: Tensor

    @staticmethod
    def of(hessian: Tensor, act_order: bool = True, damping: float = 0.01) -> Factor:
        """Args: those of `gptq`. ValueError for a Hessian that is 0 or not finite."""
        h = hessian.to(torch.float64).clone()
        if not bool(torch.isfinite(h).all()):
            raise ValueError("gptq: the Hessian holds NaN or infinity")
        energy = h.diagonal().clone()
        if float(energy.sum()) <= 0:
            raise ValueError("gptq: the Hessian is 0: no input was seen")
        h.diagonal()[energy <= 0] = float(
            energy.mean()
        )  # weights of an input that is always 0 may be rounded arbitrarily
        h.diagonal().add_(damping * energy.mean())
        order = (
            torch.argsort(energy, descending=True, stable=True)
            if act_order
            else torch.arange(len(h), device=h.device)
        )
        h = h[order][:, order]
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
        return Factor(torch.linalg.cholesky(inverse, upper=True).to(torch.float32), order)


def gptq(
    weight: Tensor,
    hessian: Tensor | Factor,
    start: QuantTensor,
    *,
    act_order: bool = True,
    damping: float = 0.01,
) -> QuantTensor:
    """The weight rounded to the scales of `start`, codes chosen for inputs with second moments `hessian`.

    Args:
        weight: float [N, K]. hessian: [K, K], symmetric, positive semidefinite; any factor. Or its `Factor`, for several weights.
        start: the weight rounded to nearest; its codes are replaced, all else is kept.
        act_order: process columns by descending energy. damping: fraction of the mean energy that is added to the diagonal.

    Raises:
        ValueError: shapes that do not fit, a Hessian that is not finite, a dense scheme or one with minimums, experts.
    """
    n, k = start.n, start.k
    if start.scheme.is_dense or start.scheme.minimums or start.lead:
        raise ValueError(f"gptq rounds one matrix of a quantized scheme without minimums, not {start}")
    moments_shape = hessian.upper.shape if isinstance(hessian, Factor) else hessian.shape
    if tuple(weight.shape) != (n, k) or tuple(moments_shape) != (k, k):
        raise ValueError(
            f"gptq: {start} needs a weight [{n}, {k}] and a Hessian [{k}, {k}], got {list(weight.shape)} and "
            f"{list(moments_shape)}"
        )
    factored = hessian if isinstance(hessian, Factor) else Factor.of(hessian, act_order, damping)
    factor, order = factored.upper, factored.order
    w = weight.to(torch.float32)[:, order]
    scale, zero = _spread(start, order)
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    for first in range(0, k, BLOCK):
        last = min(k, first + BLOCK)
        errors = torch.empty(n, last - first, device=w.device, dtype=torch.float32)
        for i in range(first, last):
            column = w[:, i]
            code, value = _round(column, scale[:, i], None if zero is None else zero[:, i], start)
            codes[:, i] = code
            error = (column - value) / factor[i, i]
            errors[:, i - first] = error
            w[:, i:last] -= error[:, None] * factor[i, i:last]
        w[:, last:] -= errors @ factor[first:last, last:]
    restored = torch.empty_like(codes)
    restored[:, order] = codes
    return replace(start, codes=numeric.pack_bits(restored, start.scheme.bits))


def search_scales(weight: Tensor, hessian: Tensor, start: QuantTensor) -> QuantTensor:
    """`start` with the scales of groups shrunk to minimize the squared error, weighted by the energy of the inputs.

    In round to nearest the largest weight of a group determines its scale; clipping it slightly often reduces the total error
    (the ``mse`` option of GPTQ's authors). Only symmetric integer schemes are changed.

    Args:
        weight, hessian, start: as for `gptq`; only the diagonal of the Hessian is used.
    """
    scheme = start.scheme
    if not scheme.is_integer or not scheme.symmetric or scheme.bits < 2 or start.scales is None:
        return start
    w, energy = weight.to(torch.float32), hessian.diagonal().to(torch.float32)
    columns = start.column_groups().to(torch.int64)
    half = 1 << (scheme.bits - 1)
    best: Tensor | None = None
    chosen = start.scales
    for shrink in SHRINKS:
        scales = (start.scales.float() * shrink).to(start.scales.dtype)
        expanded = scales.float()[:, columns]
        error = energy * (w - (w / expanded).round().clamp(-half, half - 1) * expanded).square()
        total = torch.zeros(scales.shape, device=w.device, dtype=torch.float32).index_add_(1, columns, error)
        if best is None:
            best = total
            continue
        better = total < best
        best, chosen = torch.where(better, total, best), torch.where(better, scales, chosen)
    expanded = chosen.float()[:, columns]
    codes = ((w / expanded).round().clamp(-half, half - 1) + half).to(torch.uint8)
    return replace(start, codes=numeric.pack_bits(codes, scheme.bits), scales=chosen)


def _spread(start: QuantTensor, order: Tensor) -> tuple[Tensor, Tensor | None]:
    """float32 [N, K] scale, global included, and zero of each weight, columns in order."""
    columns, rows = start.column_groups().to(torch.int64)[order], start.row_blocks().to(torch.int64)
    scale = torch.ones(start.n, start.k, device=start.device, dtype=torch.float32)
    if start.scales is not None:
        scale *= scales_to_float32(start.scales)[rows][:, columns]
    row_scale = start.row_scale()
    if row_scale is not None:
        scale *= row_scale[:, None]
    return scale, None if start.zero is None else start.zero.to(torch.float32)[rows][:, columns]


def _round(column: Tensor, scale: Tensor, zero: Tensor | None, start: QuantTensor) -> tuple[Tensor, Tensor]:
    """Nearest codes, uint8 [N], and their values."""
    scaled, scheme = column / scale, start.scheme
    if scheme.is_integer:
        offset = zero if zero is not None else float(scheme.implicit_zero)
        code = (scaled + offset).round().clamp(0, (1 << scheme.bits) - 1)
        return code.to(torch.uint8), (code - offset) * scale
    if scheme.bits == 4:
        code = numeric.e2m1_encode(scaled)
        return code, numeric.e2m1_decode(code) * scale
    code = numeric.e4m3_encode(scaled)
    return code, numeric.e4m3_decode(code) * scale
