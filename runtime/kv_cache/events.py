"""Events of a prefix cache, for routers that send requests to the engine that has their prefix. Names and fields follow vLLM's KV events."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class BlockStored:
    """Consecutive blocks of one prefix can be shared from now on.

    Attributes:
        block_hashes: one for each block: the chained hash of the block and everything before it, valid in this process.
        parent_block_hash: the hash of the block before the first; None = the first block of a prompt.
        token_ids: the ids in all the blocks in order, block_size for each.
        block_size: tokens per block.
        cache_key: what separates the caches of requests; None = all share one.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    cache_key: Hashable = None


@dataclass(slots=True)
class BlockRemoved:
    """These blocks are overwritten, and shared no more."""

    block_hashes: list[int]


@dataclass(slots=True)
class AllBlocksCleared:
    """The cache is empty."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """The events since the last `take`, in order; neighbours of one kind are one event.

    Args:
        limit: number of blocks beyond which the events are dropped, None = any: the log is stale then, and what the cache holds says more, in
            less space, than how it came about.
    """

    def __init__(self, limit: int | None = None, stale: bool = False) -> None:
        self._events: list[CacheEvent] = []
        self._limit = limit
        self._blocks = 0
        self.stale = stale

    def stored(self, hash_: int, parent: int | None, tokens: Sequence[int], cache_key: Hashable) -> None:
        """A block was registered."""
        if not self._has_room():
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent and last.cache_key == cache_key:
            last.block_hashes.append(hash_)
            last.token_ids.extend(tokens)
        else:
            self._events.append(BlockStored([hash_], parent, list(tokens), len(tokens), cache_key))

    def removed(self, hash_: int) -> None:
        """A block was evicted."""
        if not self._has_room():
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(hash_)
        else:
            self._events.append(BlockRemoved([hash_]))

    def cleared(self) -> None:
        """All blocks were forgotten."""
        if not self.stale:
            self._events, self._blocks = [AllBlocksCleared()], 0

    def take(self) -> list[CacheEvent]:
        """The events, which are then forgotten; none of a log that is stale."""
        events, self._events = self._events, []
        self._blocks = 0
        return events

    def _has_room(self) -> bool:
        """Whether the event of another block is kept."""
        if not self.stale and self._blocks == self._limit:
            self.stale = True
            self.take()
        self._blocks += not self.stale
        return not self.stale
