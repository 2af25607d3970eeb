"""Blocks as records of a store: found and checked, or written, by the threads of a transfer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from torch import Tensor

from gristmill.runtime.kv_transfer import Store
from gristmill.runtime.kv_transfer.blocks import Blocks
from gristmill.runtime.kv_transfer.carrier import Found, all_places, longest, needed, wanted_keys
from gristmill.runtime.kv_transfer.records import HEADER, RecordError, check, seal
from gristmill.runtime.steps_in_flight import StreamEvent

T = TypeVar("T")

ATTEMPTS = 4
"""Times that a prefix is loaded, each shorter than the one before, while records turn out to be unusable."""
THREADS, LEAST = max(1, min(8, (os.cpu_count() or 1) // 2)), 4
"""Threads for the records of one request, and the fewest blocks that one takes."""
DAMAGED, GONE = "a record was damaged", "a record was dropped meanwhile"


class RecordCarrier:
    """As `Carrier`: blocks as records of a store."""

    stages = True

    def __init__(self, store: Store, blocks: Blocks) -> None:
        self._store, self._blocks = store, blocks
        self.block_bytes = HEADER + blocks.nbytes
        self.sends_preempted = (
            not blocks.remote
        )  # a copy that fails there must end the step, and the scheduler is in the middle of one

    def find(self, keys: Sequence[bytes], first: int, windows: Sequence[int]) -> Found:
        """As `Carrier.find`: the blocks' records are read, and whole."""
        size, found = self._blocks.block_size, Found(first, first)
        groups = len(windows)
        places = all_places(first, len(keys), groups)
        wanted = dict(zip(places, wanted_keys(keys, first, groups), strict=True))
        has = dict(zip(wanted, self._store.matched(list(wanted.values())), strict=True))
        found.missing = [wanted[place] for place, there in has.items() if not there]
        length = len(keys)
        for _ in range(ATTEMPTS):
            length = longest(has, first, length, windows, size)
            places = needed(first, length, windows, size)
            if not places:
                break
            rows = self._blocks.rows(len(places))
            unusable = _load(self._store, rows, [wanted[place] for place in places], found.failures)
            if unusable is None:
                found.length, found.places, found.content = length, places, rows
                break
            has[places[unusable]] = False
            found.missing.append(wanted[places[unusable]])
        return found

    def send(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Callable[[], int]:
        """As `Carrier.send`: copies them to the host now."""
        rows = self._blocks.rows(len(blocks))
        event = self._blocks.read(blocks, rows)
        return partial(write, self._store, rows, keys, event)

    def receive(self, found: Found, skip: int, blocks: Sequence[int]) -> None:
        """As `Carrier.receive`: the copies are in the order of the steps."""
        self._blocks.write(blocks, found.content[skip:])

    def collect(self) -> list[bytes]:
        """As `Carrier.collect`: a store keeps copies."""
        return []

    def new_root(self, root: bytes) -> None:
        """As `Carrier.new_root`."""

    def sleep(self) -> None:
        """As `Carrier.sleep`."""

    def wake_up(self) -> None:
        """As `Carrier.wake_up`."""

    def close(self) -> None:
        """As `Carrier.close`."""
        self._store.close()


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
