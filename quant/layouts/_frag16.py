"""Packing of the frag16 layouts: tiles of 16 rows x 128 columns, codes in operand order, then scales.

w4_frag16_v1, f4_frag16_v1 and w8_frag16_v1 document the content of a tile; they differ in the bit order of the codes and in the scales.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant import numeric
from gristmill.quant.layouts import _frag16_scales as tail
from gristmill.quant.layouts._common import (
    Columns,
    collapse,
    collapse_segments,
    empty,
    sort_columns,
    unsort_columns,
)
from gristmill.quant.layouts._frag16_codes import CODE_BYTES, block_views, code_tiles, codes_of_tiles
from gristmill.quant.layouts._frag16_scales import code_order
from gristmill.quant.layouts.w4_frag16_v1 import TILE_K, TILE_ROWS, tile_bytes
from gristmill.quant.packed import Packed
from gristmill.quant.sharding import select
from gristmill.quant.tensor import QuantTensor

_BATCH = 1 << 26
"""Weights reordered at a time in torch, so that scratch memory is small compared to the weight."""


def pack_w4(weight: QuantTensor) -> Packed:
    """A copy as w4_frag16_v1. ValueError for scales that are not 16-bit floats, or zero points that are not integers."""
    return _pack(weight, "w4_frag16_v1")


def pack_f4(weight: QuantTensor) -> Packed:
    """A copy as f4_frag16_v1. ValueError for scales that its factors cannot hold."""
    return _pack(weight, "f4_frag16_v1")


def pack_w8(weight: QuantTensor) -> Packed:
    """A copy as w8_frag16_v1. ValueError for int8 scales that are not 16-bit floats, or FP8 codes that are NaN."""
    return _pack(weight, "w8_frag16_v1")


def _pack(weight: QuantTensor, name: str) -> Packed:
    scheme, device = weight.scheme, weight.device
    tail.check(weight, name)
    in_order = weight.g_idx is None or weight.scales is None
    columns = None if in_order else sort_columns(weight)
    perm = empty(torch.int32, device) if columns is None else columns.perm
    k = perm.numel() or weight.k
    scales, zero = (weight.scales, weight.zero) if columns is None else (columns.scales, columns.zero)
    if scheme.granularity == "block":
        scales = select(scales, -2, weight.row_blocks().to(torch.int64))
    row_scale = weight.row_scale()
    if scheme.granularity == "tensor" and row_scale is not None:
        scales, row_scale = row_scale[..., None], None
    if scales is None:
        raise ValueError(f"{name} needs scales of {scheme}")
    codes = weight.codes if columns is None else numeric.pack_bits(columns.codes.contiguous(), scheme.bits)
    lead, size = weight.lead, tile_bytes(scheme)
    count, groups = cdiv(weight.n, TILE_ROWS), cdiv(k, TILE_K)
    experts = torch.Size(lead).numel()
    tiles = torch.empty(experts, count * groups * size, dtype=torch.uint8, device=device)

    def each(t: Tensor | None) -> list[Tensor | None]:
        return [None] * experts if t is None else list(t.reshape(experts, *t.shape[len(lead) :]))

    rows = []
    for out, code, scale, offset, row in zip(
        tiles, each(codes), each(scales), each(zero), each(row_scale), strict=True
    ):
        assert code is not None and scale is not None
        _put_codes(code, k, weight, out, size)
        scale_parts, factor = tail.scale_bytes(scheme, scale, offset, row, code, k, count, groups)
        for part, view in block_views(out, count, groups, size):
            view[..., CODE_BYTES[code_order(scheme)] :] = scale_parts[part].view(*view.shape[:3], -1)
        rows.append(factor)
    second_slot = (
        {"row_scale": torch.stack([r for r in rows if r is not None]).view(*lead, weight.n)}
        if name == "f4_frag16_v1"
        else {"scale_type": empty(scales.dtype, device)}
    )
    slots = {"tiles": tiles.view(*lead, -1) if lead else tiles[0], **second_slot, "perm": perm}
    if (
        device.type == "cuda"
    ):  # with PDL kernels may read an immutable weight before earlier work on the stream has ended
        torch.cuda.current_stream(device).synchronize()
    n_idx = None if weight.n_idx is None else tuple(int(i) for i in weight.n_idx)
    run_groups = None if columns is None else columns.run_groups
    return Packed(name, scheme, weight.shape, slots, weight.segments, run_groups, n_idx)


def _put_codes(codes: Tensor, k: int, weight: QuantTensor, out: Tensor, size: int) -> None:
    """One matrix's codes [N, bytes] into its tiles: by a Triton kernel on a GPU if Triton is installed, else in torch."""
    order, padding = code_order(weight.scheme), weight.scheme.implicit_zero
    if codes.is_cuda and find_spec("triton") is not None:
        from gristmill.quant.layouts._frag16_triton import pack_codes

        pack_codes(codes.contiguous(), k, order, padding, out, size)
        return
    n, groups = codes.shape[0], cdiv(k, TILE_K)
    count = cdiv(n, TILE_ROWS)
    views = block_views(out, count, groups, size)
    step = max(1, _BATCH // (groups * TILE_K * 4 * TILE_ROWS)) * 4
    for part, view in views:
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            rows = numeric.unpack_bits(codes[start * TILE_ROWS : stop * TILE_ROWS], weight.scheme.bits, k)
            rows = pad(
                rows, (0, groups * TILE_K - k, 0, (stop - start) * TILE_ROWS - rows.shape[0]), value=padding
            )
            first = (start - part.start) // view.shape[1]
            made = code_tiles(rows, order)
            blocks = view[first : first + cdiv(stop - start, view.shape[1])]
            blocks[..., : CODE_BYTES[order]] = made.view(*blocks.shape[:3], -1)


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of the packings above."""
    slots, scheme = packed.slots, packed.scheme
    n, perm = packed.shape[-2], slots["perm"]
    k, lead = perm.numel() or packed.shape[-1], packed.shape[:-2]
    size, order = tile_bytes(scheme), code_order(scheme)
    count, groups = cdiv(n, TILE_ROWS), cdiv(k, TILE_K)
    experts = slots["tiles"].reshape(-1, slots["tiles"].shape[-1])
    factors = slots["row_scale"].reshape(len(experts), n) if "row_scale" in slots else [None] * len(experts)
    codes, scales, zeros = [], [], []
    for stored, factor in zip(experts, factors, strict=True):
        whole = torch.empty(count, groups, size, dtype=torch.uint8, device=stored.device)
        for part, view in block_views(stored, count, groups, size):
            whole[part] = view.reshape(part.stop - part.start, groups, size)
        codes.append(codes_of_tiles(whole[..., : CODE_BYTES[order]], order)[:n, :k])
        scale, zero = tail.scales_of(scheme, whole[..., CODE_BYTES[order] :], factor, slots, n, k)
        scales.append(scale)
        zeros.append(zero)
    code = torch.stack(codes).view(*lead, n, k)
    scale = _stack(scales).view(*lead, n, -1)
    zero = torch.stack([z for z in zeros if z is not None]).view(*lead, n, -1) if scheme.zero_points else None
    columns = Columns(code, scale, zero, perm, None)
    if packed.run_groups is not None:
        columns = unsort_columns(code, scale, zero, packed, perm)
    kept, zero, n_idx, global_scale = columns.scales, columns.zero, None, None
    if scheme.granularity in ("channel", "tensor") and kept is not None:
        kept = _same_in_all(kept, packed)
        zero = None if zero is None else _same_in_all(zero, packed)
    if scheme.granularity == "tensor" and kept is not None:
        global_scale = collapse_segments(kept[..., 0], packed)
        kept = None
    elif scheme.has_global:
        global_scale = collapse_segments(slots["row_scale"] / tail.NVFP4_UNIT, packed)
    elif scheme.granularity == "block" and kept is not None:
        rows = torch.arange(n, device=code.device) // TILE_K
        if packed.row_blocks is not None:
            rows = torch.tensor(packed.row_blocks, device=code.device)
            n_idx = rows.to(torch.int32)
        kept = collapse(kept, rows, int(rows.max()) + 1, "a block scale", packed)
    g_idx = columns.perm if packed.run_groups is not None else None
    stored = numeric.pack_bits(columns.codes.contiguous(), scheme.bits)
    return QuantTensor(stored, kept, packed.shape, scheme, zero, global_scale, packed.segments, g_idx, n_idx)


def _stack(parts: list[Tensor]) -> Tensor:
    """torch.stack, which float8 does not have."""
    return torch.stack([p.contiguous().view(torch.uint8) for p in parts]).view(parts[0].dtype)


def _same_in_all(per_tile: Tensor, packed: Packed) -> Tensor:
    """[..., N, G] of one value per row -> [..., N, 1]. ValueError if a row's differ."""
    first = per_tile[..., :1].contiguous()
    if not bool((per_tile == first).all()):
        raise ValueError(
            f"packed weight {packed.layout} {list(packed.shape)}: a row's scale differs among its tiles"
        )
    return first
