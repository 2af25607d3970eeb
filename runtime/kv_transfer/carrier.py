"""What carries blocks: as records to and from stores, or from the memory of other processes. `Transfer` decides which blocks, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

from gristmill.runtime.kv_cache.groups import first_needed
from gristmill.runtime.kv_transfer.identity import group_key

Place = tuple[int, int]
"""Index of a block in a request, and its group."""


@dataclass(slots=True)
class Found:
    """The blocks of a prefix that were found.

    Attributes:
        places: their places among the blocks of the prefix, in the order of `content`.
        length: blocks of the prefix, with the `first` that were not looked up.
        content: what the carrier takes to fill blocks of the cache with them; None = nothing was found.
        missing: keys without a block.
        failures: what went wrong, as (reason, detail).
    """

    first: int
    length: int
    places: list[Place] = field(default_factory=list)
    content: Any = None
    missing: list[bytes] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Received:
    """Blocks of the cache that were filled: how many of them, from the first on, are right; failures as of `Found`."""

    whole: int
    failures: list[tuple[str, str]] = field(default_factory=list)


class Carrier(Protocol):
    """One per transfer. Methods are called between two steps, by the thread of the engine; `find`, and what `send` and `receive` return, by
    others."""

    block_bytes: int
    """Bytes that are moved for a block."""
    stages: bool
    """Whether `send` copies the blocks to the host, where they take that memory until its work has ended. Otherwise that work reads the cache."""
    sends_preempted: bool
    """Whether the blocks of a request that loses them can be sent."""

    def find(self, keys: Sequence[bytes], first: int, windows: Sequence[int]) -> Found:
        """Look for the longest prefix of blocks from block `first` on.

        Args:
            keys: the keys of all blocks.
            windows: the windows of the groups; a group with a window needs only the last blocks.
        """
        ...

    def send(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Callable[[], int]:
        """Let others find blocks of the cache as they are after all steps that were launched. Returns the work that remains, which returns how
        many are new. OutOfMemoryError, MemoryError, OSError: there is no memory for it."""
        ...

    def receive(self, found: Found, skip: int, blocks: Sequence[int]) -> Callable[[], Received] | None:
        """Fill blocks of the cache with those that were found, but for the first `skip`, after all steps that were launched. Returns the work
        that remains, before which no step may use the blocks; None = nothing does. Errors as of `send`."""
        ...

    def collect(self) -> list[bytes]:
        """Give back blocks of the cache that others need no more. Returns keys of blocks that were overwritten since the last call: nobody
        finds them any more."""
        ...

    def new_root(self, root: bytes) -> None:
        """The weights have changed, and with them the root of all keys."""
        ...

    def sleep(self) -> None:
        """The cache is about to be given back; no work is under way."""
        ...

    def wake_up(self) -> None:
        """The cache was allocated again."""
        ...

    def close(self) -> None:
        """Give back what belongs to this process."""
        ...


def all_places(first: int, length: int, groups: int) -> list[Place]:
    """The places of blocks in all groups, from block `first` on."""
    return list(product(range(first, length), range(groups)))


def wanted_keys(keys: Sequence[bytes], first: int, groups: int) -> list[bytes]:
    """The keys of the blocks of `all_places`."""
    if groups == 1:  # the key of a block in the first group is its own
        return list(keys[first:])
    return [group_key(key, group) for key in keys[first:] for group in range(groups)]


def needed(first: int, length: int, windows: Sequence[int], size: int) -> list[Place]:
    """The blocks from `first` on that queries after `length` blocks read."""
    starts = [first_needed(window, length * size, size) for window in windows]
    places = all_places(first, length, len(starts))
    if max(starts) <= first:  # all of them, as without windows
        return places
    return [(index, group) for index, group in places if index >= starts[group]]


def longest(has: Mapping[Place, bool], first: int, length: int, windows: Sequence[int], size: int) -> int:
    """The longest prefix of at most `length` blocks of which everything needed is there."""
    if all(has.values()):
        return length
    while missing := [place[0] for place in needed(first, length, windows, size) if not has[place]]:
        length = min(missing)
    return length
