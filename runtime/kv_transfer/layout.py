"""Where the blocks of a paged cache lie: planes of rows, each row with one part of every block, the parts side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_transfer.peer_memory import Copy, PeerMemoryError


@dataclass(frozen=True, slots=True)
class Plane:
    """The part of a tensor that has blocks.

    Attributes:
        rows, pitch: rows, and bytes from one to the next.
        part: bytes of a block in a row.
    """

    rows: int
    pitch: int
    part: int


class Layout:
    """Planes, one for each tensor, with `blocks` blocks.

    Raises:
        PeerMemoryError: rows that are shorter than their blocks.
    """

    def __init__(self, planes: Sequence[Plane], blocks: int) -> None:
        self.planes, self.blocks = tuple(planes), blocks
        for plane in planes:
            if plane.rows < 1 or plane.part < 1 or plane.pitch < blocks * plane.part:
                raise PeerMemoryError(f"{blocks} blocks do not fit into the rows of {plane}")

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Layout:
        """The layout of `cache_tensors`."""
        return Layout([Plane(t.shape[0], t[0].nbytes, t.shape[2]) for t in tensors], tensors[0].shape[1])

    @staticmethod
    def parse(told: object, blocks: int) -> Layout:
        """From `plain` of another process."""
        if not isinstance(told, list):
            raise PeerMemoryError(f"planes are a list, got {told!r}")
        planes = []
        for one in told:
            valid = isinstance(one, list) and len(one) == 3 and all(type(v) is int for v in one)
            if not valid or not all(0 < v < 1 << 48 for v in one):
                raise PeerMemoryError(f"a plane is three numbers of 1 or more, got {one!r}")
            planes.append(Plane(*one))
        return Layout(planes, blocks)

    def plain(self) -> list[list[int]]:
        """As JSON."""
        return [list(astuple(plane)) for plane in self.planes]

    def has_parts_of(self, other: Layout) -> bool:
        """Whether blocks of both are made of the same parts."""
        parts = [[(plane.rows, plane.part) for plane in layout.planes] for layout in (self, other)]
        return parts[0] == parts[1]

    def check(self, sizes: Sequence[int]) -> None:
        """PeerMemoryError: tensors of these sizes do not hold the planes."""
        for plane, size in zip(self.planes, sizes, strict=True):
            if (plane.rows - 1) * plane.pitch + self.blocks * plane.part > size:
                raise PeerMemoryError(f"{plane} of {self.blocks} blocks is said to be in {size} bytes")

    def copies(
        self,
        addresses: Sequence[int],
        into: Sequence[int],
        other: Layout,
        others: Sequence[int],
        blocks: Sequence[int],
    ) -> Iterator[Copy]:
        """What copies `blocks` of a cache with another layout, whose tensors begin at `others`, to the blocks `into` of tensors at `addresses`.
        Blocks that are neighbours on both sides are one copy."""
        for first, source, count in _runs(into, blocks):
            for mine, start, theirs, base in zip(self.planes, addresses, other.planes, others, strict=True):
                yield Copy(
                    target=start + first * mine.part,
                    target_pitch=mine.pitch,
                    source=base + source * theirs.part,
                    source_pitch=theirs.pitch,
                    width=count * mine.part,
                    rows=mine.rows,
                )


def cache_tensors(cache: PagedCache) -> list[Tensor]:
    """The memory of a cache: each tensor uint8 [rows, blocks, bytes]."""
    found = [tensor for tensor in (cache.storage, cache.scales) if tensor is not None]
    return [t.view(torch.uint8).flatten(3).flatten(0, 1) for t in found]


def _runs(into: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first of `into`, first of `blocks`, count) of neighbours on both sides."""
    begin = 0
    for end in range(1, len(into) + 1):
        if end == len(into) or (into[end], blocks[end]) != (into[end - 1] + 1, blocks[end - 1] + 1):
            yield into[begin], blocks[begin], end - begin
            begin = end
