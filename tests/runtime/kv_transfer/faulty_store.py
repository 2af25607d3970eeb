"""A store that fails on request, around one that does not."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from gristmill.runtime.kv_transfer.host import HostStore


class FaultyStore(HostStore):
    """hang: while it is set, no call answers. fault: what `load` and `save` do to a part of the records, by chance: ``damage`` a byte,
    ``swap`` with another record, ``cut``, ``raise``, ``forget``, or ``any`` of these. part: how large a part."""

    def __init__(self, capacity: int = 1 << 30, fault: str = "", part: float = 1.0, seed: int = 0) -> None:
        super().__init__(capacity)
        self.hang = threading.Event()
        self.fault, self.part = fault, part
        self.faults = 0
        self._random = random.Random(seed)

    def matched(self, keys: Sequence[bytes]) -> list[bool]:
        self._answer()
        return super().matched(keys)

    def save(self, key: bytes, record: memoryview) -> None:
        self._answer()
        super().save(key, record)

    def load(self, key: bytes, into: memoryview) -> int:
        self._answer()
        fault = self.fault
        if fault == "any":
            fault = self._random.choice(["damage", "swap", "cut", "raise", "forget"])
        if not fault or self._random.random() >= self.part:
            return super().load(key, into)
        self.faults += 1
        if fault == "raise":
            raise OSError("the disk is gone")
        if fault == "forget":
            self.drop(key)
        if fault == "swap":
            key = self._random.choice([other for other in self._records if other != key] or [key])
        size = super().load(key, into)
        if fault == "cut":
            return size // 2
        if fault == "damage" and size:
            into[self._random.randrange(size)] ^= 1 << self._random.randrange(8)
        return size

    def _answer(self) -> None:
        while self.hang.is_set():
            threading.Event().wait(0.01)
