"""Packing of plain_v1: QuantTensor's order with columns sorted by group and multipliers spread over rows."""

from __future__ import annotations

import torch

from gristmill.quant import numeric
from gristmill.quant.layouts._common import collapse_segments, empty, no_perm, sort_columns, unsort_columns
from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor


def pack(weight: QuantTensor) -> Packed:
    """Shares memory with the weight unless columns have to be sorted."""
    device, scheme = weight.device, weight.scheme
    row_scale = weight.row_scale()
    codes, scales, zero, perm, run_groups = weight.codes, weight.scales, weight.zero, no_perm(device), None
    if weight.g_idx is not None:
        columns = sort_columns(weight)
        codes = numeric.pack_bits(columns.codes, scheme.bits)
        scales, zero, perm, run_groups = columns.scales, columns.zero, columns.perm, columns.run_groups
    if scheme.granularity == "tensor" and row_scale is not None:
        scales, row_scale = row_scale[..., None], None
    if scales is None:
        raise ValueError(f"plain_v1 holds quantized weights, not {scheme}")
    slots = {
        "codes": codes.contiguous(),
        "scales": scales.contiguous(),
        "zeros": empty(torch.uint8, device) if zero is None else zero.contiguous(),
        "row_scale": empty(torch.float32, device) if row_scale is None else row_scale,
        "row_block": weight.row_blocks() if scheme.granularity == "block" else empty(torch.int32, device),
        "perm": perm,
    }
    return Packed("plain_v1", scheme, weight.shape, slots, weight.segments, run_groups)


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    slots, scheme = packed.slots, packed.scheme
    codes, scales, g_idx = slots["codes"], slots["scales"], None
    zero = slots["zeros"] if slots["zeros"].numel() else None
    if packed.run_groups is not None:
        stored = numeric.unpack_bits(codes, scheme.bits, slots["perm"].numel())
        columns = unsort_columns(stored, scales, zero, packed, slots["perm"])
        codes, zero, g_idx = numeric.pack_bits(columns.codes, scheme.bits), columns.zero, columns.perm
        scales = scales if columns.scales is None else columns.scales
    global_scale = None
    if scheme.granularity == "tensor":
        global_scale = collapse_segments(scales[..., 0], packed)
    elif scheme.has_global:
        global_scale = collapse_segments(slots["row_scale"], packed)
    return QuantTensor(
        codes,
        None if scheme.granularity == "tensor" else scales,
        packed.shape,
        scheme,
        zero,
        global_scale,
        packed.segments,
        g_idx,
        slots["row_block"] if scheme.granularity == "block" else None,
    )
