"""AWQ: input channels scaled before rounding, so that those with large inputs lose least (Lin, Tang, Tang, Yang, Chen, Wang, Xiao,
Dang, Gan and Han, 2023, arXiv:2306.00978).

    x Wᵀ = (x / s) (W s)ᵀ          s = energy^(alpha / 2), one number an input channel

Rounding W s instead of W makes the error of a channel smaller by its s, next to that of the others in its group. alpha = 0 is round
to nearest; the best of a grid is taken, by the squared error of the outputs on inputs of the second moments H:
tr((Ŵ - W) H (Ŵ - W)ᵀ). The paper takes mean |x| for the size of a channel; here it is the root of the mean square, which H holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from gristmill.quant.tensor import QuantTensor

ALPHAS: Final = tuple(i / 20 for i in range(20))
"""Exponents that are tried; 0 comes first and wins ties."""
RANGE: Final = 1e4
"""A scale is between 1 / RANGE and RANGE."""


def channel_scales(energy: Tensor, alpha: float) -> Tensor:
    """energy^(alpha / 2), its largest and smallest each other's inverse; 1 where there is no energy. float32 [C]."""
    seen = energy > 0
    if alpha == 0 or not bool(seen.any()):
        return torch.ones_like(energy, dtype=torch.float32)
    log = torch.where(seen, energy.double(), energy.new_ones(()).double()).log() * (alpha / 2)
    inside = log[seen]
    log = torch.where(seen, log - (inside.max() + inside.min()) / 2, torch.zeros_like(log))
    return log.exp().clamp(1 / RANGE, RANGE).float()


def output_error(weight: Tensor, hessian: Tensor, rounded: Tensor) -> float:
    """tr((Ŵ - W) H (Ŵ - W)ᵀ): the squared error of the outputs, summed over the tokens that H was summed over."""
    difference = rounded - weight.float()
    return float(((difference @ hessian.float()) * difference).double().sum())


def search_channel_scales(
    weights: Sequence[tuple[Tensor, Tensor]],
    quantize: Callable[[Tensor], QuantTensor],
    columns: Tensor | None = None,
) -> Tensor:
    """The scales of input channels that all of these weights share.

    Args:
        weights: (W, H) of each matrix: float [N, K], and the second moments [K, K] of its inputs, by any common factor.
        quantize: rounds a float32 matrix as it will be rounded in the end.
        columns: int64 [K], the channel of each input column, where several columns share a scale; None = their own.

    Returns:
        float32 [C], what columns of W are to be multiplied by and their inputs divided by.

    Raises:
        ValueError: no weights, or shapes that do not fit.
    """
    if not weights or any(
        h.shape != (w.shape[-1],) * 2 or w.shape[-1] != weights[0][0].shape[-1] for w, h in weights
    ):
        given = ", ".join(f"{list(w.shape)} with {list(h.shape)}" for w, h in weights) or "none"
        raise ValueError(
            f"channel scales are searched for weights [N, K] of one K, each with moments [K, K]: got {given}"
        )
    energy = torch.stack([h.diagonal().float() for _, h in {id(h): (w, h) for w, h in weights}.values()]).sum(
        0
    )
    if columns is not None:
        energy = torch.zeros(int(columns.max()) + 1, device=energy.device, dtype=torch.float32).index_add_(
            0, columns, energy
        )
    best, chosen = float("inf"), torch.ones_like(energy)
    for alpha in ALPHAS:
        scales = channel_scales(energy, alpha)
        spread = scales if columns is None else scales[columns]
        error = sum(
            output_error(w, h, quantize(w.float() * spread).dequantize() / spread) for w, h in weights
        )
        if error < best:
            best, chosen = error, scales
    return chosen
