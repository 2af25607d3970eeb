"""Digests of blocks, computed where the blocks are: 64 bits that depend on every byte and its place.

A row of a block, its bytes in one tensor of one layer, is hashed by a sum of its words times fixed 64-bit multipliers (multilinear hashing,
Carter and Wegman, 1979). The rows of a block are then mixed with their places by the finalizer of MurmurHash3 (Austin Appleby) and added. For
words that were not made to collide, another row has the same sum with a probability of at most 2^-32. It finds torn copies and blocks of other
prompts; it is no protection against who can write the memory anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PART = 64 << 20
"""Bytes that are hashed by one launch; they take twice as much in addition."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of splitmix64 (Steele, Lea and Flood, 2014)
_MURMUR = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))


def mix(values: Tensor) -> Tensor:
    """MurmurHash3's finalizer of int64 values, in place."""
    for factor in (*_MURMUR, None):
        values ^= (values >> 33) & 0x7FFFFFFF  # int64 is shifted with its sign
        if factor is not None:
            values *= factor
    return values


def places(count: int, device: torch.device, seed: int) -> Tensor:
    """int64 [count]: what distinguishes places; the same on every device."""
    return mix((torch.arange(count, dtype=torch.int64, device=device) + (seed << 32)) * _GOLDEN)


class BlockDigests:
    """Digests of the blocks of some tensors.

    Args:
        tensors: each contiguous, uint8 [rows, blocks, bytes].

    Attributes:
        factors: for each tensor what its words are multiplied by, int64 [words]; words have 4 bytes where all parts of blocks are made of such.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._words: list[Tensor] = []
        self.factors: list[Tensor] = []
        for number, tensor in enumerate(tensors):
            whole = tensor.shape[-1] % 4 == 0 and tensor.data_ptr() % 4 == 0
            self._words.append(tensor.view(torch.int32) if whole else tensor)
            self.factors.append(places(self._words[-1].shape[-1], tensor.device, 2 * number) | 1)
        keys = [places(w.shape[0], w.device, 2 * number + 1) for number, w in enumerate(self._words)]
        self._keys = torch.cat(keys)[:, None]
        self._rows = [w.shape[0] for w in self._words]
        self.block_bytes = sum(tensor[:, 0].numel() for tensor in tensors)

    def parts(self, count: int) -> Iterator[slice]:
        """The places of `count` blocks in parts that `add` takes at once."""
        step = max(1, PART // self.block_bytes)
        return (slice(first, min(first + step, count)) for first in range(0, count, step))

    def sums(self, count: int) -> Tensor:
        """What `add` fills for `count` blocks."""
        return torch.empty((sum(self._rows), count), dtype=torch.int64, device=self._keys.device)

    def add(self, sums: Tensor, part: slice, blocks: Sequence[int]) -> None:
        """Hash the rows of the blocks of a part, in the order of the current stream."""
        first, count = blocks[0], len(blocks)
        adjacent = list(blocks) == list(range(first, first + count))
        chosen = None if adjacent else torch.tensor(blocks, device=sums.device)
        begin = 0
        for words, factors, rows in zip(self._words, self.factors, self._rows, strict=True):
            picked = words[:, first : first + count] if chosen is None else words.index_select(1, chosen)
            torch.sum(picked * factors, -1, out=sums[begin : begin + rows, part])
            begin += rows

    def digests(self, sums: Tensor) -> Tensor:
        """int64 [blocks] on the device, from the sums of all parts."""
        return mix(mix(sums ^ self._keys).sum(0))

    def of(self, blocks: Sequence[int]) -> Tensor:
        """int64 [blocks] on the device: the digests of blocks, as they are in the order of the current stream."""
        sums = self.sums(len(blocks))
        for part in self.parts(len(blocks)):
            self.add(sums, part, blocks[part])
        return self.digests(sums)
