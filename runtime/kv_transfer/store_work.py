"""What the threads of a transfer do with its store: find and check the records of a prefix, write those of blocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from gristmill.runtime.kv_cache.groups import first_needed
from gristmill.runtime.kv_transfer import Store
from gristmill.runtime.kv_transfer.blocks import Blocks
from gristmill.runtime.kv_transfer.identity import group_key
from gristmill.runtime.kv_transfer.records import RecordError, check, seal
from gristmill.runtime.steps_in_flight import StreamEvent

T = TypeVar("T")
Place = tuple[int, int]
"""Index of a block in a request, and its group."""

ATTEMPTS = 4
"""Times that a prefix is loaded, each shorter than the one before, while records turn out to be unusable."""
THREADS, LEAST = max(1, min(8, (os.cpu_count() or 1) // 2)), 4
"""Threads for the records of one request, and the fewest blocks that one takes."""
DAMAGED, GONE = "a record was damaged", "a record was dropped meanwhile"


@dataclass(slots=True)
class Found:
    """The blocks of a prefix that were found.

    Attributes:
        places: their places among the blocks of the prefix, in the order of `rows`.
        length: blocks of the prefix, with the `first` that were not looked up.
        missing: keys without a record.
        failures: what went wrong, as (reason, detail).
    """

    first: int
    length: int
    places: list[Place] = field(default_factory=list)
    rows: Tensor | None = None
    missing: list[bytes] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


def find(
    store: Store,
    blocks: Blocks,
    keys: Sequence[bytes],
    first: int,
    windows: Sequence[int],
    after: Future[Any] | None,
    seconds: float,
) -> Found:
    """Load the longest prefix of blocks, from block `first` on, whose records are whole.

    Args:
        keys: the keys of all blocks.
        windows: the windows of the groups; a group with a window needs only the last blocks.
        after: the work that saves these blocks at the moment; it is waited for up to `seconds`.
    """
    if after is not None:
        wait([after], seconds)
    size, found = blocks.block_size, Found(first, first)
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
    """Save rows under their keys, if the store does not have them; returns how many were saved. The rows are complete after `event`."""
    if event is not None:
        event.synchronize()
    memory = rows.numpy()
    new = [row for row, there in enumerate(store.matched(keys)) if not there]

    def save(part: range) -> None:
        for place in part:
            row = new[place]
            record = memoryview(memory[row])
            seal(record, keys[row])
            store.save(keys[row], record)

    _in_threads(len(new), save)
    return len(new)


def _load(store: Store, rows: Tensor, keys: Sequence[bytes], failures: list[tuple[str, str]]) -> int | None:
    """Fill rows with the records of keys; the first that has none that is whole, None if all have."""
    memory = rows.numpy()

    def load(part: range) -> int | None:
        for row in part:
            record = memoryview(memory[row])
            size = store.load(keys[row], record)
            if not size:
                failures.append((GONE, keys[row].hex()))
                return row
            try:
                check(record, keys[row], size)
            except RecordError as error:
                failures.append((DAMAGED, f"{keys[row].hex()} {error}"))
                store.drop(keys[row])
                return row
        return None

    return min((row for row in _in_threads(len(keys), load) if row is not None), default=None)


def _in_threads(count: int, work: Callable[[range], T]) -> list[T]:
    """work(part) for consecutive parts of range(count), at once: hashes and copies of large blocks do not hold Python's lock."""
    parts = max(1, min(THREADS, count // LEAST))
    bounds = [count * part // parts for part in range(parts + 1)]
    futures: list[Future[T]] = [Future() for _ in range(parts)]

    def run(part: int) -> None:
        try:
            futures[part].set_result(work(range(bounds[part], bounds[part + 1])))
        except BaseException as error:
            futures[part].set_exception(error)

    for part in range(1, parts):
        threading.Thread(target=run, args=(part,), name="kv-part", daemon=True).start()
    run(0)
    return [future.result() for future in futures]


def _needed(first: int, length: int, windows: Sequence[int], size: int) -> list[Place]:
    """The blocks from `first` on that queries after `length` blocks read."""
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
