"""What the threads of a transfer do with its store: find and check the records of a prefix, write those of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gristmill.runtime.kv_cache.groups import first_needed
from gristmill.runtime.kv_transfer import Store
from gristmill.runtime.kv_transfer.blocks import CacheBlocks
from gristmill.runtime.kv_transfer.identity import group_key
from gristmill.runtime.kv_transfer.records import RecordError, check, seal
from gristmill.runtime.steps_in_flight import StreamEvent

Place = tuple[int, int]
"""Index of a block in a request, and its group."""

ATTEMPTS = 4
"""Times that a prefix is loaded, each shorter than the one before, while records turn out to be unusable."""
DAMAGED, GONE = "a record was damaged", "a record was dropped meanwhile"


@dataclass(slots=True)
class Found:
    """The blocks of a prefix: those at `places`, in rows. length: blocks of the prefix, with the `first` that were not looked up. missing:
    keys without a record. failures: what went wrong, as (reason, detail)."""

    first: int
    length: int
    places: list[Place] = field(default_factory=list)
    rows: Tensor | None = None
    missing: list[bytes] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


def find(
    store: Store,
    blocks: CacheBlocks,
    keys: Sequence[bytes],
    first: int,
    windows: Sequence[int],
    after: Future[Any] | None,
    seconds: float,
) -> Found:
    """Load the longest prefix of blocks `first` and on whose records are whole.

    keys: of all blocks. windows: of the groups; of one with a window only the last blocks are needed. after: what saves these blocks at
    the moment, waited for up to `seconds`.
    """
    if after is not None:
        wait([after], seconds)
    size, found = blocks.cache.block_size, Found(first, first)
    wanted = {
        (index, group): group_key(keys[index], group)
        for index in range(first, len(keys))
        for group in range(len(windows))
    }
    has = dict(zip(wanted, store.matched(list(wanted.values())), strict=True))
    found.missing = [wanted[place] for place, there in has.items() if not there]
    length = len(keys)
    for _ in range(ATTEMPTS):
        length = _longest(has, first, length, windows, size)
        places = _needed(first, length, windows, size)
        if not places:
            break
        rows = blocks.rows(len(places))
        unusable = _load(store, rows, [wanted[place] for place in places], found.failures)
        if unusable is None:
            found.length, found.places, found.rows = length, places, rows
            break
        has[places[unusable]] = False
        found.missing.append(wanted[places[unusable]])
    return found


def write(store: Store, rows: Tensor, keys: Sequence[bytes], event: StreamEvent | None) -> int:
    """Save rows under keys, those that the store does not have. Returns how many. event: after which the rows are there."""
    if event is not None:
        event.synchronize()
    saved, memory = 0, rows.numpy()
    for row, (key, there) in enumerate(zip(keys, store.matched(keys), strict=True)):
        if not there:
            record = memoryview(memory[row])
            seal(record, key)
            store.save(key, record)
            saved += 1
    return saved


def _load(store: Store, rows: Tensor, keys: Sequence[bytes], failures: list[tuple[str, str]]) -> int | None:
    """Fill rows with the records of keys; the first that has none that is whole, None if all have."""
    memory = rows.numpy()
    for row, key in enumerate(keys):
        record = memoryview(memory[row])
        size = store.load(key, record)
        if not size:
            failures.append((GONE, key.hex()))
            return row
        try:
            check(record, key, size)
        except RecordError as error:
            failures.append((DAMAGED, f"{key.hex()} {error}"))
            store.drop(key)
            return row
    return None


def _needed(first: int, length: int, windows: Sequence[int], size: int) -> list[Place]:
    """The blocks from `first` on that queries behind `length` blocks read."""
    starts = [first_needed(window, length * size, size) for window in windows]
    return [
        (index, group)
        for index in range(first, length)
        for group, start in enumerate(starts)
        if index >= start
    ]


def _longest(has: Mapping[Place, bool], first: int, length: int, windows: Sequence[int], size: int) -> int:
    """The longest prefix of at most `length` blocks of which everything needed is there."""
    while missing := [place[0] for place in _needed(first, length, windows, size) if not has[place]]:
        length = min(missing)
    return length
