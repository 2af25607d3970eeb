"""Packing of cpu_rows16_v1: 16 output rows interleaved by 32-bit words of consecutive columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant import memory, numeric
from gristmill.quant.layouts._common import (
    Columns,
    collapse,
    collapse_segments,
    empty,
    no_perm,
    sort_columns,
    unsort_columns,
    zero_codes,
)
from gristmill.quant.layouts.args import CODES, VALUES
from gristmill.quant.layouts.cpu_rows16_v1 import ROWS, padded_k
from gristmill.quant.native import packing_function
from gristmill.quant.packed import Packed
from gristmill.quant.sharding import select
from gristmill.quant.tensor import DENSE_DTYPES, QuantTensor, scales_to_float32

NAME = "cpu_rows16_v1"
_UNIT_SCALE = {torch.uint8: 127, torch.float8_e4m3fn: 1.0}  # E8M0 127 = 2**0


_CHUNK = 1 << 20
"""Weights reordered at a time, so that scratch memory is small compared to the weight."""


def pack(weight: QuantTensor) -> Packed:
    """A copy in the interleaved order."""
    device, scheme = weight.device, weight.scheme
    if device.type == "cpu" and weight.g_idx is None and padded_k(scheme, weight.k) == weight.k:
        native = packing_function("gm_rows16_codes", CODES)
        if native is not None:
            return _pack_native(weight, native)
    if scheme.is_dense:
        dense = weight.dense()
        missing = padded_k(scheme, weight.k) - weight.k
        padded = pad(dense, (0, missing)) if missing else dense  # pad copies even if it adds nothing
        slots = {"codes": _interleave(padded.view(torch.uint8), scheme.bits, 0), **_unused(device)}
        return Packed(NAME, scheme, weight.shape, slots)
    count, step = torch.Size(weight.lead).numel(), max(ROWS, _CHUNK // weight.k // ROWS * ROWS)
    slots, columns = {}, None
    for i, expert in enumerate(weight.experts()):
        for start in range(0, weight.n, step):
            fields, columns = _pack_rows(expert.narrow(0, start, min(step, weight.n - start)))
            for name, piece in fields.items():
                if name not in slots:
                    blocks = (count, cdiv(weight.n, ROWS), *piece.shape[1:])
                    slots[name] = piece.new_empty(blocks) if piece.numel() else piece
                if piece.numel():
                    slots[name][i, start // ROWS : start // ROWS + piece.shape[0]] = piece
    if columns is None:
        raise ValueError(f"{NAME} packs at least one matrix, got {weight}")
    slots = {name: t.view(*weight.lead, *t.shape[1:]) if t.numel() else t for name, t in slots.items()}
    n_idx = None if weight.n_idx is None else tuple(int(i) for i in weight.n_idx)
    return Packed(
        NAME,
        scheme,
        weight.shape,
        {**slots, "perm": columns.perm},
        weight.segments,
        columns.run_groups,
        n_idx,
    )


def _pack_native(weight: QuantTensor, pack_codes: Callable[..., None]) -> Packed:
    """`pack` of a weight whose columns are in order and need no padding, without unpacking its codes."""
    scheme, (n, k) = weight.scheme, weight.shape[-2:]
    source, words = weight.codes.contiguous(), k * scheme.bits // 32
    codes = memory.parameter((*weight.lead, cdiv(n, ROWS), words, 4 * ROWS), torch.uint8)
    padding = (
        0 if scheme.is_dense else scheme.implicit_zero * (0x11111111 if scheme.bits == 4 else 0x01010101)
    )
    for rows, lines in zip(source.view(-1, n, 4 * words), codes.view(-1, *codes.shape[-3:]), strict=True):
        pack_codes(
            rows=rows.data_ptr(),
            row_bytes=4 * words,
            n=n,
            words=words,
            nibbles=scheme.bits == 4,
            padding=padding,
            packed=lines.data_ptr(),
        )
    slots = {"codes": codes, **_unused(weight.device)}
    if not scheme.is_dense:
        slots |= _scale_slots(weight, weight.scales, weight.zero)
    n_idx = None if weight.n_idx is None else tuple(int(i) for i in weight.n_idx)
    return Packed(NAME, scheme, weight.shape, slots, weight.segments, None, n_idx)


def _unused(device: torch.device) -> dict[str, Tensor]:
    """The slots beside the codes of a dense weight."""
    return {
        "scales": empty(torch.float32, device),
        "zeros": empty(torch.uint8, device),
        "row_scale": empty(torch.float32, device),
        "perm": no_perm(device),
    }


def _pack_rows(weight: QuantTensor) -> tuple[dict[str, Tensor], Columns]:
    """The slots of a matrix except perm, by blocks of rows, and its sorted columns."""
    columns = sort_columns(weight)
    codes = _interleave(_pad_columns(weight, columns), weight.scheme.bits, weight.scheme.implicit_zero)
    return {"codes": codes, **_scale_slots(weight, columns.scales, columns.zero)}, columns


def _scale_slots(weight: QuantTensor, scales: Tensor | None, zero: Tensor | None) -> dict[str, Tensor]:
    """The slots of a weight's multipliers and zeros. scales, zero: the weight's, or those of its sorted columns."""
    device, scheme, row_scale = weight.device, weight.scheme, weight.row_scale()
    if scheme.granularity == "block":
        scales = select(scales, -2, weight.row_blocks().to(torch.int64))
    if scheme.granularity == "tensor" and row_scale is not None:
        scales, row_scale = row_scale[..., None], None
    if scales is None:
        raise ValueError(f"{NAME} needs scales of {scheme}")
    return {
        "scales": _by_block(scales, _UNIT_SCALE.get(scales.dtype, 1.0)),
        "zeros": empty(torch.uint8, device) if zero is None else _by_block(zero, 0),
        "row_scale": empty(torch.float32, device)
        if row_scale is None
        else _by_block(row_scale[..., None], 1.0)[..., 0, :],
    }


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    slots, scheme = packed.slots, packed.scheme
    n, k = packed.shape[-2:]
    stored = _deinterleave(slots["codes"], scheme.bits)[..., :n, :]
    if scheme.is_dense:
        return QuantTensor(stored[..., : k * scheme.bits // 8].contiguous(), None, packed.shape, scheme)
    scales = _by_row(slots["scales"], n)
    zero = _by_row(slots["zeros"], n) if slots["zeros"].numel() else None
    columns = unsort_columns(stored, scales, zero, packed, slots["perm"])
    codes = numeric.pack_bits(columns.codes.contiguous(), scheme.bits)
    scales_out, n_idx, global_scale = columns.scales, None, None
    if scheme.granularity == "tensor":
        scales_out, global_scale = None, collapse_segments(scales[..., 0], packed)
    elif scheme.has_global:
        global_scale = collapse_segments(_by_row(slots["row_scale"][..., None, :], n)[..., 0], packed)
    elif scheme.granularity == "block" and scales_out is not None:
        rows = torch.arange(n, device=codes.device) // 128
        if packed.row_blocks is not None:
            rows = torch.tensor(packed.row_blocks, device=codes.device)
            n_idx = rows.to(torch.int32)
        scales_out = collapse(scales_out, rows, int(rows.max()) + 1, "a block scale", packed)
    g_idx = columns.perm if packed.run_groups is not None else None
    return QuantTensor(
        codes, scales_out, packed.shape, scheme, columns.zero, global_scale, packed.segments, g_idx, n_idx
    )


def rows(packed: Packed, index: Tensor) -> Tensor:
    """The rows of an [N, K] weight that an int64 tensor [T] names, [T, K]: in the dtype of a dense scheme, else float32.

    Raises:
        ValueError: a weight of experts, or one whose columns are sorted.
    """
    slots, scheme, k = packed.slots, packed.scheme, packed.shape[-1]
    if len(packed.shape) != 2 or slots["perm"].numel():
        raise ValueError(f"{NAME} reads rows of a matrix with columns in order, not of {list(packed.shape)}")
    block, lane = index // ROWS, index % ROWS
    words = slots["codes"].view(torch.int32)[block, :, lane].view(torch.uint8)
    if scheme.is_dense:
        return words.view(DENSE_DTYPES[scheme.weight])[:, :k]
    if scheme.bits == 4:
        quads = words.unflatten(-1, (-1, 4))
        words = torch.stack((quads & 0xF, quads >> 4), -2).flatten(-3)
    values: Tensor
    if scheme.is_integer:
        values = words.to(torch.float32)
    else:
        values = numeric.e2m1_decode(words) if scheme.bits == 4 else numeric.e4m3_decode(words)
    group = scheme.group_size or words.shape[-1]
    values = values.unflatten(-1, (-1, group))
    zero: Tensor | int = scheme.implicit_zero
    if slots["zeros"].numel():
        zero = slots["zeros"][block, :, lane].to(torch.float32)[..., None]
    values = (values - zero) * scales_to_float32(_lanes(slots["scales"], block, lane))[..., None]
    if slots["row_scale"].numel():
        values *= slots["row_scale"][block, lane][:, None, None]
    matrix: Tensor = values.flatten(-2)
    return matrix[:, :k]


def _lanes(blocks: Tensor, block: Tensor, lane: Tensor) -> Tensor:
    """[B, G, 16] -> [T, G]; float8 is indexed as bytes."""
    return (
        blocks.view(torch.uint8)[block, :, lane].view(blocks.dtype)
        if blocks.itemsize == 1
        else blocks[block, :, lane]
    )


def _pad_columns(weight: QuantTensor, columns: Columns) -> Tensor:
    """Codes [..., N, K'] with padding columns that decode to 0, if a code does."""
    missing = padded_k(weight.scheme, columns.codes.shape[-1]) - columns.codes.shape[-1]
    if not missing:
        return columns.codes
    padding = zero_codes(weight, columns.zero)
    if isinstance(padding, int):
        return pad(columns.codes, (0, missing), value=padding)
    return torch.cat([columns.codes, padding[..., -1:].expand(*columns.codes.shape[:-1], missing)], -1)


def _interleave(codes: Tensor, bits: int, pad_code: int) -> Tensor:
    """[..., N, K'] 4-bit codes one per byte, or [..., N, bytes] -> [..., blocks, words, 64]."""
    missing = -codes.shape[-2] % ROWS
    codes = pad(codes, (0, 0, 0, missing), value=pad_code) if missing else codes
    if bits == 4:
        halves = codes.unflatten(-1, (-1, 2, 4))
        codes = (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)
    words: Tensor = codes.unflatten(-1, (-1, 4)).unflatten(-3, (-1, ROWS))
    return words.transpose(-3, -2).flatten(-2).contiguous()


def _deinterleave(lines: Tensor, bits: int) -> Tensor:
    """Inverse of _interleave, with its padding."""
    words: Tensor = lines.unflatten(-1, (ROWS, 4)).transpose(-3, -2)
    rows = words.flatten(-4, -3).flatten(-2)
    if bits != 4:
        return rows
    quads = rows.unflatten(-1, (-1, 4))
    return torch.stack((quads & 0xF, quads >> 4), -2).flatten(-3)


def _by_block(per_row: Tensor, fill: float) -> Tensor:
    """[..., N, G] -> [..., blocks, G, 16]."""
    dtype = per_row.dtype
    missing = -per_row.shape[-2] % ROWS
    native = packing_function("gm_rows16_values", VALUES) if per_row.device.type == "cpu" else None
    if native is not None:
        n, groups = per_row.shape[-2:]
        padding = int.from_bytes(_bytes(torch.tensor([fill]).to(dtype)).numpy().tobytes(), "little")
        packed = memory.parameter((*per_row.shape[:-2], cdiv(n, ROWS), groups, ROWS), dtype)
        values = per_row.contiguous().view(-1, n, groups)
        for rows, lines in zip(values, packed.view(-1, *packed.shape[-3:]), strict=True):
            native(
                rows=rows.data_ptr(),
                row_values=groups,
                n=n,
                groups=groups,
                bytes=dtype.itemsize,
                padding=padding,
                packed=lines.data_ptr(),
            )
        return packed
    if missing:
        shape = (*per_row.shape[:-2], missing, per_row.shape[-1])
        tail = torch.full(shape, fill, dtype=torch.float32, device=per_row.device).to(dtype)
        per_row = torch.cat([_bytes(per_row), _bytes(tail)], -2).view(dtype)
    blocks: Tensor = (
        _bytes(per_row).unflatten(-1, (per_row.shape[-1], dtype.itemsize)).unflatten(-3, (-1, ROWS))
    )
    return blocks.transpose(-3, -2).contiguous().flatten(-2).view(dtype)


def _by_row(blocks: Tensor, n: int) -> Tensor:
    """Inverse of _by_block: [..., blocks, G, 16] -> [..., N, G]."""
    dtype = blocks.dtype
    octets: Tensor = _bytes(blocks).unflatten(-1, (ROWS, dtype.itemsize)).transpose(-3, -2)
    return octets.flatten(-4, -3).contiguous().flatten(-2).view(dtype)[..., :n, :].contiguous()


def _bytes(t: Tensor) -> Tensor:
    """Last dimension as bytes: torch.cat does not support float8, and nothing here may round."""
    return t.contiguous().view(torch.uint8)
