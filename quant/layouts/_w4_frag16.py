"""Packing of w4_frag16_v1: a permutation of nibbles, in torch operations on the weight's own device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.quant import numeric
from gristmill.quant.layouts._common import Columns, empty, sort_columns, unsort_columns
from gristmill.quant.layouts.w4_frag16_v1 import BLOCK_TILES, TILE_BYTES, TILE_K, TILE_ROWS
from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor

NAME = "w4_frag16_v1"
CODE_BYTES = TILE_ROWS * TILE_K // 2
_BATCH = 1 << 28
"""Weights unpacked at a time, so that the scratch memory stays small beside the weight."""


def pack(weight: QuantTensor) -> Packed:
    """A copy in tile order. ValueError for scales that are not 16-bit floats."""
    columns = sort_columns(weight)
    scales = columns.scales
    if scales is None or scales.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{NAME} holds bfloat16 or float16 scales, got {None if scales is None else scales.dtype}; "
                         "convert them, or use another layout")  # fmt: skip
    lead = weight.shape[:-2]
    codes = columns.codes.flatten(0, -3) if lead else columns.codes[None]
    flat_scales = scales.flatten(0, -3) if lead else scales[None]
    tiles = torch.stack([_pack_matrix(c, s) for c, s in zip(codes, flat_scales, strict=True)])
    tiles = tiles.view(*lead, -1) if lead else tiles[0]
    if tiles.is_cuda:  # kernels may start to read an immutable weight before the work queued ahead of them has ended
        torch.cuda.current_stream(tiles.device).synchronize()
    slots = {"tiles": tiles, "scale_type": empty(scales.dtype, weight.device), "perm": columns.perm}
    return Packed(NAME, weight.scheme, weight.shape, slots, weight.segments, columns.run_groups)


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    slots, n = packed.slots, packed.shape[-2]
    tiles, scale_type, perm = slots["tiles"], slots["scale_type"], slots["perm"]
    k = perm.numel() or packed.shape[-1]
    lead = packed.shape[:-2]
    matrices = [_unpack_matrix(m, n, k, scale_type.dtype) for m in tiles.reshape(-1, tiles.shape[-1])]
    codes = torch.stack([c for c, _ in matrices]).view(*lead, n, k)
    scales = torch.stack([s for _, s in matrices]).view(*lead, n, k // TILE_K)
    columns = Columns(codes, scales, None, perm, None)
    if packed.run_groups is not None:
        columns = unsort_columns(codes, scales, None, packed, perm)
    g_idx = columns.perm if packed.run_groups is not None else None
    stored = numeric.pack_bits(columns.codes.contiguous(), 4)
    kept = columns.scales
    return QuantTensor(stored, kept, packed.shape, packed.scheme, None, None, packed.segments, g_idx)


def _pack_matrix(codes: Tensor, scales: Tensor) -> Tensor:
    """uint8 codes [N, K'] below 16 and scales [N, K' / 128] -> uint8 [bytes]."""
    n, k = codes.shape
    count, groups = -(-n // TILE_ROWS), k // TILE_K
    out = torch.empty(count * groups * TILE_BYTES, dtype=torch.uint8, device=codes.device)
    step = max(1, _BATCH // (k * TILE_ROWS * BLOCK_TILES)) * BLOCK_TILES
    for start in range(0, count, step):  # whole blocks, so each part is contiguous in `out`
        stop = min(start + step, count)
        part, part_scales = codes[start * TILE_ROWS : stop * TILE_ROWS], scales[start * TILE_ROWS : stop * TILE_ROWS]
        rows = (stop - start) * TILE_ROWS
        part = pad(part, (0, 0, 0, rows - part.shape[0]), value=8)
        # row half, g | h, w, column half of 16, t, odd column -> h, g, t, w, then a word's nibbles by odd, column half, row half
        words = part.view(stop - start, 2, 8, groups, 2, 4, 2, 4, 2).permute(0, 3, 4, 2, 7, 5, 8, 6, 1).reshape(-1, 2)
        packed = (words[:, 0] | (words[:, 1] << 4)).view(stop - start, groups, CODE_BYTES)
        part_scales = pad(part_scales, (0, 0, 0, rows - part_scales.shape[0]))
        by_tile = part_scales.view(stop - start, 2, 8, groups).permute(0, 3, 2, 1).contiguous()
        tiles = torch.cat([packed, by_tile.view(torch.uint8).view(stop - start, groups, -1)], 2)
        target = out[start * groups * TILE_BYTES : stop * groups * TILE_BYTES]
        full = (stop - start) // BLOCK_TILES * BLOCK_TILES
        head = tiles[:full].unflatten(0, (-1, BLOCK_TILES)).transpose(1, 2)
        target[: full * groups * TILE_BYTES].view(head.shape).copy_(head)
        tail = tiles[full:].transpose(0, 1)
        target[full * groups * TILE_BYTES :].view(tail.shape).copy_(tail)
    return out


def _unpack_matrix(stored: Tensor, n: int, k: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inverse of _pack_matrix: codes [N, K'], scales [N, K' / 128]."""
    count, groups = -(-n // TILE_ROWS), k // TILE_K
    full = count // BLOCK_TILES * BLOCK_TILES
    cut = full * groups * TILE_BYTES
    head = stored[:cut].view(-1, groups, BLOCK_TILES, TILE_BYTES).transpose(1, 2).reshape(full, groups, TILE_BYTES)
    tail = stored[cut:].view(groups, count - full, TILE_BYTES).transpose(0, 1)
    tiles = torch.cat([head, tail])
    packed = tiles[..., :CODE_BYTES].reshape(-1)
    nibbles = torch.stack([packed & 15, packed >> 4], 1).view(count, groups, 2, 8, 4, 4, 2, 2, 2)
    codes = nibbles.permute(0, 8, 3, 1, 2, 5, 7, 4, 6).reshape(count * TILE_ROWS, k)[:n]
    by_tile = tiles[..., CODE_BYTES:].contiguous().view(scale_dtype).view(count, groups, 8, 2)
    scales = by_tile.permute(0, 3, 2, 1).reshape(count * TILE_ROWS, groups)[:n]
    return codes.contiguous(), scales.contiguous()
