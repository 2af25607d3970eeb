"""Functions shared by layouts: columns sorted by group, scales expanded over rows, and their checked inverses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.quant.packed import Packed
from gristmill.quant.sharding import select
from gristmill.quant.tensor import QuantTensor, same_bits


@dataclass(frozen=True, eq=False)
class Columns:
    """Codes one per byte [..., N, K'], with scales and zeros [..., rows, G] of consecutive runs of group_size.

    perm is int32 [K'] (empty: columns in order, K' = K); run_groups the original scale column of each run.
    """

    codes: Tensor
    scales: Tensor | None
    zero: Tensor | None
    perm: Tensor
    run_groups: tuple[int, ...] | None


def empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of an unused slot."""
    return torch.empty(0, dtype=dtype, device=device)


def no_perm(device: torch.device) -> Tensor:
    """The perm of unsorted columns."""
    return empty(torch.int32, device)


def sort_columns(q: QuantTensor) -> Columns:
    """Columns stably sorted by group, each group padded to whole runs of the group size; as they are without g_idx.

    A padded column has perm -1 and the code that decodes to 0, where there is one (a float zero has none, nor has the
    integer zero 2**bits): kernels take x as 0 there.
    """
    if q.g_idx is None or q.scales is None:
        return Columns(q.unpacked(), q.scales, q.zero, no_perm(q.device), None)
    size = q.scheme.group_size or 1
    group = q.g_idx.to(torch.int64)
    counts = torch.bincount(group, minlength=q.scales.shape[-1])
    runs = ((counts + size - 1) // size).clamp(min=1)
    run_groups = torch.repeat_interleave(torch.arange(counts.numel(), device=q.device), runs)
    order = torch.argsort(group, stable=True)
    first_sorted = counts.cumsum(0) - counts
    first_slot = (runs.cumsum(0) - runs) * size
    place = torch.arange(q.k, device=q.device) - first_sorted[group[order]] + first_slot[group[order]]
    perm = torch.full((int(runs.sum()) * size,), -1, dtype=torch.int64, device=q.device)
    perm[place] = order
    zero = select(q.zero, -1, run_groups)
    codes = q.unpacked().index_select(-1, perm.clamp(min=0))
    padding = zero_codes(q, zero)
    if isinstance(padding, Tensor):
        padding = padding.repeat_interleave(size, -1)
        codes = torch.where(perm < 0, padding, codes)
    else:
        codes[..., perm < 0] = padding
    groups = tuple(int(g) for g in run_groups)
    return Columns(codes, select(q.scales, -1, run_groups), zero, perm.to(torch.int32), groups)


def unsort_columns(
    codes: Tensor, scales: Tensor | None, zero: Tensor | None, packed: Packed, perm: Tensor
) -> Columns:
    """Inverse of sort_columns; in the result perm is the g_idx, empty where there was none."""
    k = packed.shape[-1]
    if packed.run_groups is None:
        return Columns(codes[..., :k], scales, zero, no_perm(codes.device), None)
    source = perm.to(torch.int64)
    real = source >= 0
    if not torch.equal(source[real].sort().values, torch.arange(k, device=perm.device)):
        raise ValueError(
            f"packed weight {packed.layout} {list(packed.shape)}: perm does not name each of {k} columns once"
        )
    run_groups = torch.tensor(packed.run_groups, dtype=torch.int64, device=codes.device)
    size = packed.scheme.group_size or 1
    g_idx = torch.empty(k, dtype=torch.int32, device=codes.device)
    g_idx[source[real]] = run_groups.repeat_interleave(size)[real].to(torch.int32)
    columns = torch.empty(k, dtype=torch.int64, device=codes.device)
    columns[source[real]] = real.nonzero()[:, 0]
    first = torch.searchsorted(run_groups, torch.arange(int(run_groups[-1]) + 1, device=codes.device))
    for tensor in (scales, zero):
        spread = select(select(tensor, -1, first), -1, run_groups)
        if spread is not None and tensor is not None and not same_bits(spread, tensor):
            raise ValueError(
                f"packed weight {packed.layout} {list(packed.shape)}: runs of one group have different scales"
            )
    return Columns(
        codes.index_select(-1, columns), select(scales, -1, first), select(zero, -1, first), g_idx, None
    )


def zero_codes(q: QuantTensor, zero: Tensor | None) -> Tensor | int:
    """Codes that decode to 0: one for all, or uint8 of the shape of ``zero`` (nearest code where none is exact)."""
    if zero is None:
        return q.scheme.implicit_zero
    return zero.to(torch.float32).round().clamp(0, (1 << q.scheme.bits) - 1).to(torch.uint8)


def collapse(per_row: Tensor, rows: Tensor, count: int, description: str, packed: Packed) -> Tensor:
    """[..., N, C] values that rows share -> [..., count, C], rows[n] being the shared row of n.

    Raises:
        ValueError: rows that share one value differ.
    """
    first = torch.full((count,), per_row.shape[-2], dtype=torch.int64, device=per_row.device)
    order = torch.arange(per_row.shape[-2], device=per_row.device)
    first.scatter_reduce_(0, rows.to(torch.int64), order, "amin")
    shared = per_row.index_select(-2, first)
    if not same_bits(shared.index_select(-2, rows.to(torch.int64)), per_row):
        raise ValueError(
            f"packed weight {packed.layout} {list(packed.shape)}: rows that share {description} differ in it"
        )
    return shared


def collapse_segments(per_row: Tensor, packed: Packed) -> Tensor:
    """float32 [..., N] multipliers -> [..., segments]."""
    ends = (*packed.segments[1:], packed.shape[-2])
    lengths = torch.tensor([b - a for a, b in zip(packed.segments, ends, strict=True)], device=per_row.device)
    rows = torch.repeat_interleave(torch.arange(len(ends), device=per_row.device), lengths)
    return collapse(per_row[..., None], rows, len(ends), "a segment's multiplier", packed)[..., 0]
