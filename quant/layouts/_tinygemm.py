"""Packing of tinygemm_v1: what `torch._convert_weight_to_int4pack` makes with 8 inner tiles, in torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant import numeric
from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor


def pack(weight: QuantTensor) -> Packed:
    """ValueError for what the product cannot take."""
    n, k, scales = weight.n, weight.k, weight.scales
    if weight.lead or weight.g_idx is not None or n % 8 or k % 128:
        raise ValueError(
            f"tinygemm_v1 holds one [N, K] matrix without act-order, N a multiple of 8 and K of 128, got {weight}"
        )
    if scales is None or scales.dtype != torch.bfloat16:
        raise ValueError(f"tinygemm_v1 holds bfloat16 scales, got {None if scales is None else scales.dtype}")
    codes = numeric.unpack_bits(weight.codes, 4, k).to(torch.int64)
    # [n / 8, g, k / 128, p, half of 16, second 8, t, odd] -> [n / 8, k / 128, g, t, p, odd, half, second 8]
    parts = (
        codes.view(n // 8, 8, k // 128, 4, 2, 2, 4, 2)
        .permute(0, 2, 1, 6, 3, 7, 4, 5)
        .reshape(n // 8, k // 128, 32, 4, 8)
    )
    words = (parts << _shifts(codes.device)).sum(-1)
    tiles = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    pairs = torch.stack((scales.T, torch.zeros_like(scales.T)), -1).contiguous()
    return Packed(
        "tinygemm_v1", weight.scheme, weight.shape, {"tiles": tiles, "scales": pairs}, weight.segments
    )


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    n, k = packed.shape
    tiles, pairs = packed.slots["tiles"], packed.slots["scales"]
    parts = (tiles.to(torch.int64)[..., None] >> _shifts(tiles.device)) & 15
    order = parts.view(n // 8, k // 128, 8, 4, 4, 2, 2, 2).permute(0, 2, 1, 4, 6, 7, 3, 5)
    codes = numeric.pack_bits(order.reshape(n, k).to(torch.uint8), 4)
    return QuantTensor(
        codes, pairs[..., 0].T.contiguous(), packed.shape, packed.scheme, segments=packed.segments
    )


def _shifts(device: torch.device) -> Tensor:
    """Bits of a word's eight codes: odd columns 16 further."""
    return torch.tensor([0, 4, 8, 12, 16, 20, 24, 28], device=device)
