"""Records in the memory of this process, the least recently used one dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gristmill.runtime.kv_transfer import StoreSpec, parse_bytes


class HostStore:
    """Records in host memory. `capacity` is the bytes of all records."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._records: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def matched(self, keys: Sequence[bytes]) -> list[bool]:
        """As `Store.matched`."""
        with self._lock:
            return [key in self._records for key in keys]

    def load(self, key: bytes, into: memoryview) -> int:
        """As `Store.load`."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return 0
            self._records.move_to_end(key)
        if len(record) <= len(into):
            np.copyto(np.frombuffer(into, np.uint8)[: len(record)], record)  # without Python's lock
        return len(record)

    def save(self, key: bytes, record: memoryview) -> None:
        """As `Store.save`."""
        if len(record) > self.capacity:
            return
        copy = np.frombuffer(record, np.uint8).copy()
        with self._lock:
            self._forget(key)
            self.nbytes += len(copy)
            self._records[key] = copy
            while self.nbytes > self.capacity:
                self.nbytes -= len(self._records.popitem(last=False)[1])

    def drop(self, key: bytes) -> None:
        """As `Store.drop`."""
        with self._lock:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        if (record := self._records.pop(key, None)) is not None:
            self.nbytes -= len(record)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._records.clear()
            self.nbytes = 0


STORE = StoreSpec(
    name="host",
    summary="host:SIZE, memory of this process",
    open=lambda argument: HostStore(parse_bytes(argument, "the store 'host:SIZE'")),
)
