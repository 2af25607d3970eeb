"""Rows of packed weights read back in torch: float32 values, from plain_v1, cpu_rows16_v1 or cpu_groups16_v1 slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant import numeric
from gristmill.quant.tensor import scales_to_float32

PLAIN_SLOTS, ROWS16_SLOTS = 6, 5
ROWS = 16
"""Rows of a block of cpu_rows16_v1; slices of such a weight start and end at multiples of it."""


@dataclass(frozen=True)
class Rows:
    """Rows of a packed weight, one code per byte. codes [R, K'], scales and zero [R or 1, G], multiplier [R] or None."""

    codes: Tensor
    scales: Tensor
    zero: Tensor | None
    multiplier: Tensor | None


def perm_of(weight: Sequence[Tensor]) -> Tensor | None:
    """The column of x for each packed column, None when in order."""
    perm = weight[5] if len(weight) == PLAIN_SLOTS else weight[4]
    return perm if perm.numel() and not _is_groups16(weight) else None


def gather(x: Tensor, perm: Tensor | None) -> Tensor:
    """x [..., K] in the order of the packed columns, 0 for padding columns."""
    if perm is None:
        return x
    return torch.where(
        perm >= 0, x[..., perm.clamp(min=0).long()], torch.zeros((), dtype=x.dtype, device=x.device)
    )


def dequantize_rows(weight: Sequence[Tensor], scheme: QuantScheme, k: int, start: int, stop: int) -> Tensor:
    """float32 rows [start, stop) of a packed weight, [stop - start, K']; K' = k unless columns were sorted.

    start is a multiple of 16. Raises ValueError for a list of tensors that is neither packing.
    """
    if _is_groups16(weight):
        return _groups16(weight, scheme, k, start, stop)
    if len(weight) == PLAIN_SLOTS:
        rows = _plain(weight, scheme, k, start, stop)
    elif len(weight) == ROWS16_SLOTS:
        rows = _rows16(weight, scheme, k, start, stop)
    else:
        raise ValueError(
            f"expected the 6 tensors of plain_v1 or the 5 of cpu_rows16_v1 or cpu_groups16_v1, got {len(weight)}"
        )
    columns = rows.codes.shape[1]
    if scheme.is_integer:
        value = rows.codes.float()
    else:
        value = numeric.e2m1_decode(rows.codes) if scheme.bits == 4 else numeric.e4m3_decode(rows.codes)

    def spread(per_group: Tensor) -> Tensor:
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(scheme.group_size or columns, 1)[:, :columns]

    if rows.zero is not None and not scheme.minimums:
        value -= spread(rows.zero.float())
    elif scheme.implicit_zero:
        value -= scheme.implicit_zero
    value *= spread(scales_to_float32(rows.scales))
    if rows.zero is not None and scheme.minimums:
        value -= spread(rows.zero.float())
    return value if rows.multiplier is None else value * rows.multiplier[:, None]


def _is_groups16(weight: Sequence[Tensor]) -> bool:
    """Whether five tensors are those of cpu_groups16_v1: its last ones are factors, where cpu_rows16_v1 has an order of columns."""
    return len(weight) == ROWS16_SLOTS and weight[4].dtype == torch.float32


def _groups16(weight: Sequence[Tensor], scheme: QuantScheme, k: int, start: int, stop: int) -> Tensor:
    codes, scales, offsets, factors, offset_factors = weight
    first, last, count = start // ROWS, cdiv(stop, ROWS), stop - start
    lines, high = codes[first:last], None
    if scheme.bits in (5, 6):  # a line of high bits after 4 or 2 lines of low ones
        shared = 4 if scheme.bits == 5 else 2
        runs = lines.unflatten(1, (-1, shared + 1))
        lines, high = runs[:, :, :shared].flatten(1, 2), runs[:, :, shared]

    def by_row(blocks: Tensor) -> Tensor:
        rows: Tensor = blocks.unflatten(-1, (ROWS, 4)).transpose(1, 2).flatten(-2).flatten(0, 1)[:count]
        return rows

    values = by_row(lines)
    if scheme.bits != 8:
        quads = values.unflatten(-1, (-1, 4))
        values = torch.stack((quads & 0xF, quads >> 4), -2).flatten(-3)
    if high is not None:
        width, fields = scheme.bits - 4, by_row(high).unflatten(-1, (-1, 1, 4))
        shifts = torch.arange(8 // width, dtype=torch.uint8, device=codes.device)[:, None] * width
        values = values | (((fields >> shifts) & ((1 << width) - 1)).flatten(-3) << 4)

    def spread(per_group: Tensor, factor: Tensor) -> Tensor:
        numbers = per_group[first:last].transpose(1, 2).flatten(0, 1)[:count].float()
        if factor.numel():
            by = factor[first:last].transpose(1, 2).flatten(0, 1)[:count]
            numbers = numbers * by.repeat_interleave(numbers.shape[1] // by.shape[1], 1)
        return numbers.repeat_interleave(scheme.group_size or k, 1)

    result = (values.float() - scheme.implicit_zero) * spread(scales, factors)
    return result - spread(offsets, offset_factors) if offsets.numel() else result


def _plain(weight: Sequence[Tensor], scheme: QuantScheme, k: int, start: int, stop: int) -> Rows:
    codes, scales, zeros, row_scale, row_block, perm = weight
    columns = perm.numel() or k
    scales = scales[row_block[start:stop].long()] if row_block.numel() else scales[start:stop]
    return Rows(
        numeric.unpack_bits(codes[start:stop], scheme.bits, columns),
        scales,
        zeros[start:stop] if zeros.numel() else None,
        row_scale[start:stop] if row_scale.numel() else None,
    )


def _rows16(weight: Sequence[Tensor], scheme: QuantScheme, k: int, start: int, stop: int) -> Rows:
    codes, scales, zeros, row_scale, perm = weight
    first, last, count = start // ROWS, cdiv(stop, ROWS), stop - start

    def by_row(blocks: Tensor) -> Tensor:
        part = blocks[first:last]
        part = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
        rows = part.transpose(1, 2).reshape(-1, part.shape[1])[:count]
        return rows.contiguous().view(torch.float8_e4m3fn) if blocks.dtype == torch.float8_e4m3fn else rows

    lines = codes[first:last].unflatten(-1, (ROWS, 4)).transpose(1, 2).flatten(-2).flatten(0, 1)[:count]
    if scheme.bits == 4:
        quads = lines.unflatten(-1, (-1, 4))
        lines = torch.stack((quads & 0xF, quads >> 4), -2).flatten(-3)
    columns = perm.numel() or k
    return Rows(
        lines[:, :columns].contiguous(),
        by_row(scales),
        by_row(zeros) if zeros.numel() else None,
        row_scale[first:last].reshape(-1)[:count] if row_scale.numel() else None,
    )
