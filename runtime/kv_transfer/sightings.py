"""How often recent blocks were seen."""

from __future__ import annotations

from collections import OrderedDict

MOST = 1 << 17
"""Keys that are remembered, about 20 MB."""
SAVED = 256
"""The count of a block that was given to the store."""


class Sightings:
    """Counts by key; the key that was seen longest ago is forgotten first."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def is_due(self, key: bytes, after: int) -> bool:
        """Count a block; whether it has been seen `after` times, and was not saved yet."""
        count = self._counts.pop(key, 0)
        if count != SAVED:
            count = min(count + 1, SAVED - 1)
        self._counts[key] = count
        if len(self._counts) > MOST:
            self._counts.popitem(last=False)
        return after <= count < SAVED

    def saved(self, key: bytes) -> None:
        """It was given to the store."""
        self._counts[key] = SAVED

    def was_saved(self, key: bytes) -> bool:
        """Whether it was given to the store, which may have dropped it since."""
        return self._counts.get(key) == SAVED

    def lost(self, key: bytes) -> None:
        """The store does not have it: it is due when it is seen again."""
        if self.was_saved(key):
            self._counts[key] = SAVED - 1

    def clear(self) -> None:
        """Forget all."""
        self._counts.clear()
