"""Packing of scales128x4_v1: codes as they are, scales in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant.layouts._common import collapse_segments, empty
from gristmill.quant.layouts.scales128x4_v1 import GROUPS, ROWS
from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor

LANES = 32
"""Rows of a tile that follow each other in it."""


def pack(weight: QuantTensor) -> Packed:
    """Codes share memory with the weight. ValueError for columns in another order."""
    if weight.g_idx is not None or weight.scales is None:
        raise ValueError(
            f"scales128x4_v1 holds codes with scales of groups of neighbouring columns, got {weight}"
        )
    row_scale = weight.row_scale()
    slots = {
        "codes": weight.codes.contiguous(),
        "scales": tiled(weight.scales.view(torch.uint8)),
        "row_scale": empty(torch.float32, weight.device) if row_scale is None else row_scale,
    }
    return Packed("scales128x4_v1", weight.scheme, weight.shape, slots, weight.segments)


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    slots, scheme, (n, k) = packed.slots, packed.scheme, packed.shape[-2:]
    scales = untiled(slots["scales"], n, scheme.groups(k))
    if scheme.has_global:
        return QuantTensor(
            slots["codes"],
            scales.view(torch.float8_e4m3fn),
            packed.shape,
            scheme,
            None,
            collapse_segments(slots["row_scale"], packed),
            packed.segments,
        )
    return QuantTensor(slots["codes"], scales, packed.shape, scheme, segments=packed.segments)


def tiled(scales: Tensor) -> Tensor:
    """uint8 [..., N, G] -> [..., ceil(N / 128), ceil(G / 4), 512], zero past N and G."""
    n, groups = scales.shape[-2:]
    down, across = cdiv(n, ROWS), cdiv(groups, GROUPS)
    padded = torch.nn.functional.pad(scales, (0, across * GROUPS - groups, 0, down * ROWS - n))
    parts = padded.unflatten(-1, (across, GROUPS)).unflatten(-3, (down, ROWS // LANES, LANES))
    # [..., down, quarter, lane, across, group] -> [..., down, across, lane, quarter, group]
    order = (-5, -2, -3, -4, -1)
    lead = range(parts.dim() - 5)
    tiles: Tensor = parts.permute(*lead, *(parts.dim() + place for place in order)).flatten(-3)
    return tiles.contiguous()


def untiled(tiles: Tensor, n: int, groups: int) -> Tensor:
    """Inverse of `tiled`, uint8 [..., N, G]."""
    parts = tiles.unflatten(-1, (LANES, ROWS // LANES, GROUPS))
    order, lead = (-5, -2, -3, -4, -1), range(parts.dim() - 5)
    rows: Tensor = parts.permute(*lead, *(parts.dim() + place for place in order)).flatten(-2).flatten(-4, -2)
    return rows[..., :n, :groups].contiguous()
