"""Which rows, columns and experts of a weight each rank has (Shoeybi et al., 2019, arXiv:1909.08053). Pure functions of sizes.

Matrices that produce the inner dimension of a block (q/k/v, gate/up) are cut by rows, those that consume it (output, down) by columns:
each rank then computes a part of the sum, and one all-reduce completes it. Heads stay whole. KV heads that are fewer than the ranks
are replicated. Experts are cut by index. The latent projections of MLA, norms and routers have no cut: every rank has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.quant import QuantTensor, concat
from gristmill.quant.errors import UsageError

Range = tuple[int, int]
"""First and last + 1."""


@dataclass(frozen=True)
class Piece:
    """A run of rows or columns, or the experts, that the ranks share among themselves: q, k and v are three pieces.

    heads: how many heads it has, each of which stays whole; 0 = it is not made of heads. Then ranges begin at multiples of `unit`
    where every rank gets one, so that scales of groups and of 128-blocks are not divided.
    """

    length: int
    heads: int = 0
    unit: int = BLOCK

    def range(self, rank: int, world: int) -> Range:
        """The part of a rank. Parts differ by at most one head or one unit.

        Raises:
            UsageError: heads that `world` neither divides nor is a multiple of; fewer entries than ranks.
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
class Cut:
    """How ranks share a weight. dim: what is divided. pieces: consecutive runs along it, each divided separately; of a fused matrix
    they run on over the parts."""

    dim: Literal["rows", "columns", "experts"]
    pieces: tuple[Piece, ...]

    @staticmethod
    def rows(*lengths: int, unit: int = BLOCK) -> Cut:
        """Rows of each part, anywhere."""
        return Cut("rows", tuple(Piece(length, unit=unit) for length in lengths))

    @staticmethod
    def columns(length: int) -> Cut:
        """Columns, anywhere."""
        return Cut("columns", (Piece(length),))

    @staticmethod
    def head_rows(*heads: int, size: int) -> Cut:
        """Rows by heads of `size` rows; heads: of each part."""
        return Cut("rows", tuple(Piece(count * size, count) for count in heads))

    @staticmethod
    def head_columns(heads: int, size: int) -> Cut:
        """Columns by heads of `size` columns."""
        return Cut("columns", (Piece(heads * size, heads),))

    @staticmethod
    def experts(count: int) -> Cut:
        """Experts by index."""
        return Cut("experts", (Piece(count, unit=1),))

    def ranges(self, rank: int, world: int) -> list[Range]:
        """What a rank has, piece by piece, in positions over all pieces."""
        ranges, start = [], 0
        for piece in self.pieces:
            first, last = piece.range(rank, world)
            ranges.append((start + first, start + last))
            start += piece.length
        return ranges


def of_parts(ranges: list[Range], lengths: tuple[int, ...]) -> list[list[Range]]:
    """Ranges over all parts of these lengths, as ranges of each part."""
    divided, start = [], 0
    for length in lengths:
        inside = [(max(a, start) - start, min(b, start + length) - start) for a, b in ranges]
        divided.append([(a, b) for a, b in inside if a < b])
        start += length
    return divided


@dataclass(frozen=True)
class Share:
    """rows: of each part, the ranges that a rank keeps, in order. columns: None = all. experts: a range of their indices."""

    rows: tuple[tuple[Range, ...], ...]
    columns: Range | None = None
    experts: Range = (0, 0)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of each part."""
        return tuple(sum(last - first for first, last in ranges) for ranges in self.rows)


def share_of(cut: Cut | None, rows: tuple[int, ...], experts: int, rank: int, world: int) -> Share:
    """The share of a rank. rows: of each part; experts: of each of them, 0 = no experts."""
    whole = Share(tuple(((0, count),) for count in rows), None, (0, experts))
    if cut is None or world == 1:
        return whole
    ranges = cut.ranges(rank, world)
    if cut.dim == "rows":
        return replace(whole, rows=tuple(map(tuple, of_parts(ranges, rows))))
    (only,) = ranges
    return replace(whole, columns=only) if cut.dim == "columns" else replace(whole, experts=only)


def float_share(tensor: Tensor, rows: tuple[Range, ...], columns: Range | None = None) -> Tensor:
    """The share of [N, ...] or, of columns, [N, K]: a view where it is one range of rows, so that only that range is read."""
    pieces = [tensor[first:last] for first, last in rows]
    kept = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return kept if columns is None else kept[:, columns[0] : columns[1]].contiguous()


def quant_share(weight: QuantTensor, rows: tuple[Range, ...], columns: Range | None = None) -> QuantTensor:
    """The share of a quantized [N, K], exactly; the weight itself if it is all of it."""
    if columns is not None and columns != (0, weight.k):
        weight = weight.narrow(-1, columns[0], columns[1] - columns[0])
    if rows == ((0, weight.n),):
        return weight
    return concat([weight.narrow(-2, first, last - first) for first, last in rows], -2)


def rounds_rows_alone(scheme: QuantScheme) -> bool:
    """Whether a row is rounded to the same codes without the other rows: it shares no scale with them."""
    return scheme.granularity in ("group", "channel") and not scheme.has_global
