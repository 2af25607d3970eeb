"""Slicing and concatenation of QuantTensors before packing, exactly: the result dequantizes to the same bits, or an error is raised.

Parts of groups and blocks keep their scales: the slice has an index (g_idx along K, n_idx along N) from its columns or
rows to its scales. An index that equals consecutive runs of the group size is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.quant import memory, numeric


class Quantized(Protocol):
    """The interface of a `QuantTensor` that these functions use; its methods call them."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def scheme(self) -> QuantScheme: ...
    @property
    def zero(self) -> Tensor | None: ...
    @property
    def global_scale(self) -> Tensor | None: ...
    @property
    def segments(self) -> tuple[int, ...]: ...
    @property
    def g_idx(self) -> Tensor | None: ...
    @property
    def n_idx(self) -> Tensor | None: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def unpacked(self) -> Tensor: ...
    def column_groups(self) -> Tensor: ...
    def row_blocks(self) -> Tensor: ...
    def row_scale(self) -> Tensor | None: ...
    def with_tensors(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], segments: tuple[int, ...] | None = None
    ) -> Self: ...


Q = TypeVar("Q", bound=Quantized)

_SHARED = ("g_idx", "n_idx")
"""Fields that all experts share."""


def shard(q: Q, dim: int, rank: int, world: int) -> Q:
    """Part ``rank`` of ``world`` equal parts of ``q.shape[dim]``.

    Raises:
        ValueError: the dimension does not divide by world, or rank is outside 0..world-1.
    """
    dim = _dim(q, dim)
    size = q.shape[dim]
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"shard needs 0 <= rank < world, got rank {rank} of {world}")
    if size % world:
        raise ValueError(
            f"shard: dimension {dim} of {q} has {size} entries, not divisible by {world}; use narrow()"
        )
    return narrow(q, dim, rank * (size // world), size // world)


def narrow(q: Q, dim: int, start: int, length: int) -> Q:
    """Entries [start, start + length) along ``dim`` of the logical shape, as a copy.

    Raises:
        ValueError: dim or the range is outside the shape.
    """
    dim = _dim(q, dim)
    if start < 0 or length < 1 or start + length > q.shape[dim]:
        raise ValueError(f"narrow: [{start}, {start + length}) is outside dimension {dim} of {q}")
    if dim == len(q.shape) - 1:
        return _narrow_k(q, start, length)
    if dim == len(q.shape) - 2:
        return _narrow_n(q, start, length)
    parts = {name: _copy(t, dim, start, length) for name, t in q.tensors().items() if name not in _SHARED}
    return _rebuild(q, (*q.shape[:dim], length, *q.shape[dim + 1 :]), parts)


def take_rows(q: Q, index: Tensor) -> Q:
    """The rows named by ``index``, integer [N'], in that order, as a copy.

    Raises:
        ValueError: an index outside 0..N-1, none at all, or rows of several global multipliers.
    """
    rows = index.to(device=q.device, dtype=torch.int64)
    if rows.dim() != 1 or not rows.numel() or int(rows.min()) < 0 or int(rows.max()) >= q.n:
        raise ValueError(f"rows: an index of {list(index.shape)} entries in 0..{q.n - 1} is expected of {q}")
    if len(q.segments) > 1:
        raise ValueError(f"rows: {q} has several global multipliers; take rows before parts are joined")
    new: dict[str, Tensor | None] = {"codes": q.codes.index_select(-2, rows)}
    if q.scheme.granularity == "block":
        new["n_idx"] = q.row_blocks().index_select(0, rows)
    elif q.scales is not None:
        new["scales"], new["zero"] = select(q.scales, -2, rows), select(q.zero, -2, rows)
    return _rebuild(q, (*q.shape[:-2], rows.numel(), q.k), new)


def concat(tensors: Sequence[Q], dim: int, codes: Tensor | None = None) -> Q:
    """Joins QuantTensors of one scheme along ``dim`` of the logical shape.

    Along N (fused q/k/v, gate/up) each part keeps its own global multiplier as a segment and its own partial blocks. codes:
    the concatenated codes, if available, so that large ones are not copied again.

    Raises:
        ValueError: nothing to join; schemes, scale dtypes, devices or other dimensions differ; or the result cannot be
            exact: along N different g_idx, along K different scales per channel or different global multipliers.
    """
    if not tensors:
        raise ValueError("concat needs at least one QuantTensor, got none")
    first = tensors[0]
    dim = _dim(first, dim)
    for other in tensors[1:]:
        _check_joinable(first, other, dim)
    if len(tensors) == 1:
        return first
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    if dim == len(shape) - 1:
        return _concat_k(tensors, tuple(shape))
    if dim == len(shape) - 2:
        return _concat_n(tensors, tuple(shape), codes)
    for other in tensors[1:]:
        _check_experts(first, other, dim)
    joined = {
        name: torch.cat([t.tensors()[name] for t in tensors], dim)
        for name in first.tensors()
        if name not in _SHARED
    }
    return _rebuild(first, tuple(shape), joined)


def stack(tensors: Iterable[Q], count: int | None = None) -> Q:
    """[N, K] matrices of one scheme and shape -> one tensor [their number, N, K]; same conditions as concat.

    With `count`, matrices may be generated one by one: each is copied into the result and can be freed afterwards.
    """
    if count is None:
        tensors = list(tensors)
        count = len(tensors)
    first, out, count_copied = None, {}, 0
    for tensor in tensors:
        parts = {name: t for name, t in tensor.tensors().items() if name not in _SHARED}
        if first is None:
            first = tensor
            out = {name: memory.empty((count, *t.shape), t.dtype, t.device) for name, t in parts.items()}
        _check_joinable(first, tensor, 0, whole=True)
        _check_experts(first, tensor, 0)
        _need(
            all(t.shape == out[name].shape[1:] for name, t in parts.items()),
            first,
            tensor,
            0,
            "numbers of scales differ",
        )
        if count_copied == count:
            raise ValueError(f"stack expected {count} QuantTensors and got more")
        for name, place in out.items():
            place[count_copied].copy_(parts[name])
        count_copied += 1
    if first is None or count_copied != count:
        raise ValueError(f"stack needs at least one QuantTensor and expected {count}, got {count_copied}")
    return _rebuild(first, (count, *first.shape), out)


def _narrow_k(q: Q, start: int, length: int) -> Q:
    bits = q.scheme.bits
    if start * bits % 8 == 0 and length * bits % 8 == 0:
        codes = _copy(q.codes, -1, start * bits // 8, length * bits // 8)
    else:
        codes = numeric.pack_bits(q.unpacked()[..., start : start + length], bits)
    new: dict[str, Tensor | None] = {"codes": codes}
    if q.scheme.granularity in ("group", "block"):
        size = q.scheme.group_size or length
        scale_columns, new["g_idx"] = _renumber(q.column_groups()[start : start + length], size)
        new["scales"] = select(q.scales, -1, scale_columns)
        new["zero"] = select(q.zero, -1, scale_columns)
    return _rebuild(q, (*q.shape[:-1], length), new)


def _narrow_n(q: Q, start: int, length: int) -> Q:
    new: dict[str, Tensor | None] = {"codes": _copy(q.codes, -2, start, length)}
    if q.scheme.granularity == "block":
        scale_rows, new["n_idx"] = _renumber(q.row_blocks()[start : start + length], BLOCK)
        new["scales"] = select(q.scales, -2, scale_rows)
        new["zero"] = select(q.zero, -2, scale_rows)
    elif q.scales is not None:
        new["scales"] = _copy(q.scales, -2, start, length)
        new["zero"] = None if q.zero is None else _copy(q.zero, -2, start, length)
    segments = q.segments
    if q.global_scale is not None:
        ends = (*segments[1:], q.n)
        inside = [
            i for i, (a, b) in enumerate(zip(segments, ends, strict=True)) if a < start + length and b > start
        ]
        new["global_scale"] = q.global_scale[..., inside[0] : inside[-1] + 1].clone()
        segments = tuple(max(0, segments[i] - start) for i in inside)
    return _rebuild(q, (*q.shape[:-2], length, q.k), new, segments)


def _concat_n(tensors: Sequence[Q], shape: tuple[int, ...], codes: Tensor | None) -> Q:
    first = tensors[0]
    for other in tensors[1:]:
        _need(
            _same_columns(first, other),
            first,
            other,
            -2,
            "g_idx differs: the rows of one tensor share one; keep them apart",
        )
    new: dict[str, Tensor | None] = {
        "codes": torch.cat([t.codes for t in tensors], -2) if codes is None else codes
    }
    new["scales"] = _cat([t.scales for t in tensors], -2)
    new["zero"] = _cat([t.zero for t in tensors], -2)
    new["global_scale"] = _cat([t.global_scale for t in tensors], -1)
    if first.scheme.granularity == "block":
        new["n_idx"] = _join_index([t.row_blocks() for t in tensors], [t.scales for t in tensors], -2, BLOCK)
    segments: list[int] = []
    row = 0
    for t in tensors:
        segments += [row + s for s in t.segments]
        row += t.n
    return _rebuild(first, shape, new, tuple(segments) if first.scheme.has_global else (0,))


def _concat_k(tensors: Sequence[Q], shape: tuple[int, ...]) -> Q:
    first, bits = tensors[0], tensors[0].scheme.bits
    if all(t.k * bits % 8 == 0 for t in tensors):
        codes = torch.cat([t.codes for t in tensors], -1)
    else:
        codes = numeric.pack_bits(torch.cat([t.unpacked() for t in tensors], -1), bits)
    new: dict[str, Tensor | None] = {"codes": codes}
    for other in tensors[1:]:
        row_scale, other_row_scale = first.row_scale(), other.row_scale()
        same = row_scale is None or other_row_scale is None or torch.equal(row_scale, other_row_scale)
        _need(same, first, other, -1, "global scales differ; rescaling the block scales would round")
        if first.scheme.granularity == "channel":
            same = _equal(first.scales, other.scales) and _equal(first.zero, other.zero)
            _need(same, first, other, -1, "per-channel scales differ, and a channel has one")
        if first.scheme.granularity == "block":
            _need(
                _same_rows(first, other), first, other, -1, "n_idx differs: columns of one tensor share one"
            )
    if first.scheme.granularity in ("group", "block"):
        size = first.scheme.group_size or 1
        new["g_idx"] = _join_index(
            [t.column_groups() for t in tensors], [t.scales for t in tensors], -1, size
        )
        new["scales"] = _cat([t.scales for t in tensors], -1)
        new["zero"] = _cat([t.zero for t in tensors], -1)
    return _rebuild(first, shape, new)


def _renumber(index: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """(scale indices in use, ascending; the index renumbered to them, or None when it is i // size)."""
    used, inverse = torch.unique(index, return_inverse=True)
    return used.to(torch.int64), drop_regular(inverse.to(torch.int32), size)


def _join_index(parts: list[Tensor], scales: list[Tensor | None], scale_dim: int, size: int) -> Tensor | None:
    offset, shifted = 0, []
    for index, scale in zip(parts, scales, strict=True):
        shifted.append(index + offset)
        offset += 0 if scale is None else scale.shape[scale_dim]
    regular = drop_regular(torch.cat(shifted), size)
    # A scale that no index names (an act-order group emptied by its owner) would break the plain rule: keep the index.
    return torch.cat(shifted) if offset != cdiv(sum(p.numel() for p in parts), size) else regular


def drop_regular(index: Tensor, size: int) -> Tensor | None:
    """The index, or None when entry i is i // size."""
    regular = torch.arange(index.numel(), dtype=index.dtype, device=index.device) // size
    return None if torch.equal(index, regular) else index


def _copy(t: Tensor, dim: int, start: int, length: int) -> Tensor:
    """An own copy, so that a shard does not keep its checkpoint alive."""
    return t.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def select(t: Tensor | None, dim: int, index: Tensor) -> Tensor | None:
    """index_select that takes None and float8."""
    if t is None:
        return None
    if t.dtype == torch.float8_e4m3fn:  # not every device indexes float8
        return t.view(torch.uint8).index_select(dim, index).view(t.dtype)
    return t.index_select(dim, index)


def _cat(parts: list[Tensor | None], dim: int) -> Tensor | None:
    present = [p for p in parts if p is not None]
    if not present:
        return None
    if present[0].dtype == torch.float8_e4m3fn:
        return torch.cat([p.contiguous().view(torch.uint8) for p in present], dim).view(torch.float8_e4m3fn)
    return torch.cat(present, dim)


def _rebuild(
    q: Q,
    shape: tuple[int, ...],
    new: Mapping[str, Tensor | None],
    segments: tuple[int, ...] | None = None,
) -> Q:
    """q with another shape and the given tensors; those not given stay."""
    held = {name: t for name, t in {**q.tensors(), **new}.items() if t is not None}
    return q.with_tensors(held, shape, segments)


def _check_joinable(first: Quantized, other: Quantized, dim: int, whole: bool = False) -> None:
    """Same scheme, device, dtypes, and dimensions but `dim`; those too if `whole`."""
    _need(first.scheme == other.scheme, first, other, dim, "schemes differ")
    a, b = list(first.shape), list(other.shape)
    same = a == b if whole else len(a) == len(b) and a[:dim] + a[dim + 1 :] == b[:dim] + b[dim + 1 :]
    _need(same, first, other, dim, "dimensions differ" if whole else "other dimensions differ")
    _need(first.device == other.device, first, other, dim, f"devices {first.device} and {other.device}")
    for name in ("scales", "zero"):
        mine, theirs = first.tensors().get(name), other.tensors().get(name)
        same = mine is None or theirs is None or mine.dtype == theirs.dtype
        _need(same, first, other, dim, f"dtypes of {name} differ")


def _check_experts(first: Quantized, other: Quantized, dim: int) -> None:
    _need(_same_columns(first, other), first, other, dim, "g_idx differs, and experts share one")
    _need(_same_rows(first, other), first, other, dim, "n_idx differs, and experts share one")
    _need(
        first.segments == other.segments, first, other, dim, f"segments {first.segments} and {other.segments}"
    )


def _need(condition: bool, first: Quantized, other: Quantized, dim: int, why: str) -> None:
    if not condition:
        raise ValueError(f"cannot concatenate {first} and {other} along dimension {dim}: {why}")


def _same_columns(a: Quantized, b: Quantized) -> bool:
    return (a.g_idx is None and b.g_idx is None) or torch.equal(a.column_groups(), b.column_groups())


def _same_rows(a: Quantized, b: Quantized) -> bool:
    return (a.n_idx is None and b.n_idx is None) or torch.equal(a.row_blocks(), b.row_blocks())


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def _dim(q: Quantized, dim: int) -> int:
    rank = len(q.shape)
    if not -rank <= dim < rank:
        raise ValueError(f"dimension {dim} is outside the shape of {q}")
    return dim % rank
