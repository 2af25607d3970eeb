"""Which rows, columns and experts of a weight each rank holds (Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053).

Matrices that produce the inner dimension of a block (q/k/v, gate/up) are sharded by rows (column-parallel in Megatron's transposed
notation), those that consume it (output, down) by columns: each rank computes a partial sum, and one all-reduce completes it. Heads stay
whole. KV heads that are fewer than the ranks are replicated. Experts are sharded by index. The latent projections of MLA, norms and routers
are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.quant.errors import UsageError
from gristmill.quant.sharding import concat
from gristmill.quant.tensor import QuantTensor

Range = tuple[int, int]
"""First index and last index + 1."""


@dataclass(frozen=True)
class Shard:
    """A run of rows, columns or experts that is divided among the ranks. q, k and v of a fused matrix are three of them.

    Attributes:
        length: rows, columns or experts.
        heads: number of heads, each of which stays on one rank; 0 = not made of heads.
        unit: without heads, ranges start at multiples of this if every rank then gets one, so that scale groups and 128-blocks are not
            divided.
    """

    length: int
    heads: int = 0
    unit: int = BLOCK

    def range(self, rank: int, world: int) -> Range:
        """The range of a rank. Ranges differ by at most one head or one unit.

        Raises:
            UsageError: `world` neither divides the number of heads nor is a multiple of it, or there are fewer entries than ranks.
        """
        if self.heads:
            size = self.length // self.heads
            if self.heads % world == 0:
                count = self.heads // world
                return rank * count * size, (rank + 1) * count * size
            if world % self.heads == 0:  # replicated
                first = rank * self.heads // world * size
                return first, first + size
            raise UsageError(
                f"{self.heads} heads cannot be shared by {world} ranks; a divisor or a multiple can"
            )
        unit = self.unit
        while unit > 1 and cdiv(self.length, unit) < world:
            unit //= 2
        count = cdiv(self.length, unit)
        if count < world:
            raise UsageError(
                f"{self.length} entries cannot be shared by {world} ranks; at most {self.length} can"
            )
        first, last = (min(self.length, (r * count + world - 1) // world * unit) for r in (rank, rank + 1))
        return first, last


@dataclass(frozen=True)
class ShardSpec:
    """How a weight is sharded.

    Attributes:
        dim: the dimension that is divided.
        shards: consecutive runs along it, each divided on its own. In a fused matrix they continue across its parts.
    """

    dim: Literal["rows", "columns", "experts"]
    shards: tuple[Shard, ...]

    @staticmethod
    def rows(*lengths: int, unit: int = BLOCK) -> ShardSpec:
        """By rows; `lengths` of the parts of a fused matrix."""
        return ShardSpec("rows", tuple(Shard(length, unit=unit) for length in lengths))

    @staticmethod
    def columns(length: int) -> ShardSpec:
        """By columns."""
        return ShardSpec("columns", (Shard(length),))

    @staticmethod
    def head_rows(*heads: int, size: int, whole: tuple[int, ...] = ()) -> ShardSpec:
        """By heads of `size` rows; `heads` of each part. Every rank has the parts in `whole`."""
        return ShardSpec(
            "rows",
            tuple(Shard(count * size, 1 if part in whole else count) for part, count in enumerate(heads)),
        )

    @staticmethod
    def head_columns(heads: int, size: int) -> ShardSpec:
        """By heads of `size` columns."""
        return ShardSpec("columns", (Shard(heads * size, heads),))

    @staticmethod
    def experts(count: int) -> ShardSpec:
        """By expert index."""
        return ShardSpec("experts", (Shard(count, unit=1),))

    def ranges(self, rank: int, world: int) -> list[Range]:
        """The ranges of a rank, one per shard, in positions over all shards."""
        ranges, start = [], 0
        for shard in self.shards:
            first, last = shard.range(rank, world)
            ranges.append((start + first, start + last))
            start += shard.length
        return ranges


def of_parts(ranges: list[Range], lengths: tuple[int, ...]) -> list[list[Range]]:
    """Ranges over all parts of a fused matrix, as ranges within each part of these lengths."""
    divided, start = [], 0
    for length in lengths:
        inside = [(max(a, start) - start, min(b, start + length) - start) for a, b in ranges]
        divided.append([(a, b) for a, b in inside if a < b])
        start += length
    return divided


@dataclass(frozen=True)
class LocalRanges:
    """What one rank holds of a weight.

    Attributes:
        rows: per part, the ranges of rows, in order.
        columns: the range of columns; None = all.
        experts: the range of expert indices.
    """

    rows: tuple[tuple[Range, ...], ...]
    columns: Range | None = None
    experts: Range = (0, 0)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Number of rows of each part."""
        return tuple(sum(last - first for first, last in ranges) for ranges in self.rows)


def local_ranges(
    spec: ShardSpec | None, rows: tuple[int, ...], experts: int, rank: int, world: int
) -> LocalRanges:
    """What a rank holds of a weight.

    Args:
        spec: None = replicated.
        rows: number of rows of each part.
        experts: number of experts; 0 = none.
    """
    whole = LocalRanges(tuple(((0, count),) for count in rows), None, (0, experts))
    if spec is None or world == 1:
        return whole
    ranges = spec.ranges(rank, world)
    if spec.dim == "rows":
        return replace(whole, rows=tuple(map(tuple, of_parts(ranges, rows))))
    (only,) = ranges
    return replace(whole, columns=only) if spec.dim == "columns" else replace(whole, experts=only)


def shard_floats(tensor: Tensor, rows: tuple[Range, ...], columns: Range | None = None) -> Tensor:
    """These rows and columns of [N, ...]: a view if it is one range of rows, so that only that range is read from a file."""
    kept = [tensor[first:last] for first, last in rows]
    joined = kept[0] if len(kept) == 1 else torch.cat(kept)
    return joined if columns is None else joined[:, columns[0] : columns[1]].contiguous()


def shard_quantized(
    weight: QuantTensor, rows: tuple[Range, ...], columns: Range | None = None
) -> QuantTensor:
    """These rows and columns of a quantized [N, K], exactly; the weight itself if that is all of it."""
    if columns is not None and columns != (0, weight.k):
        weight = weight.narrow(-1, columns[0], columns[1] - columns[0])
    if rows == ((0, weight.n),):
        return weight
    return concat([weight.narrow(-2, first, last - first) for first, last in rows], -2)


def quantizes_rows_independently(scheme: QuantScheme) -> bool:
    """Whether a row gets the same codes without the other rows: it shares no scale with them."""
    return scheme.granularity in ("group", "channel") and not scheme.has_global
