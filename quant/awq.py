"""AWQ: input channels scaled before rounding, so that those with large inputs lose the least precision (Lin, Tang, Tang, Yang, Chen, Wang, Xiao,
Dang, Gan and Han, 2023, arXiv:2306.00978).

    x Wᵀ = (x / s) (W s)ᵀ          s = energy^(alpha / 2), one number per input channel

Rounding W s instead of W divides the error of a channel by its s, relative to the others in its group. alpha = 0 is round
to nearest. The best alpha of a grid is used, by the squared error of the outputs on inputs of the second moments H:
tr((Ŵ - W) H (Ŵ - W)ᵀ). The paper measures the size of a channel by mean |x|; here it is the root mean square, which H contains.
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
    """energy^(alpha / 2), scaled such that the product of the largest and the smallest is 1; 1 for channels without energy. float32 [C]."""
    has_energy = energy > 0
    if alpha == 0 or not bool(has_energy.any()):
        return torch.ones_like(energy, dtype=torch.float32)
    log = torch.where(has_energy, energy.double(), energy.new_ones(()).double()).log() * (alpha / 2)
    logs = log[has_energy]
    log = torch.where(has_energy, log - (logs.max() + logs.min()) / 2, torch.zeros_like(log))
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
        quantize: the final rounding of a float32 matrix.
        columns: int64 [K], the channel of each input column, if several columns share a scale; None = one scale per column.

    Returns:
        float32 [C]: the factors by which columns of W are multiplied and their inputs divided.

    Raises:
        ValueError: no weights, or shapes that do not fit.
    """
    if not weights or any(
        h.shape != (w.shape[-1],) * 2 or w.shape[-1] != weights[0][0].shape[-1] for w, h in weights
    ):
        shapes = ", ".join(f"{list(w.shape)} with {list(h.shape)}" for w, h in weights) or "none"
        raise ValueError(
            f"channel scales are searched for weights [N, K] of one K, each with moments [K, K]: got {shapes}"
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
