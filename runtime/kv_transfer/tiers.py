"""Several stores as one, the fastest first: what is saved goes to all, what is loaded comes from the first that has it."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.runtime.kv_transfer import Store


class Tiers:
    """A record that only a slower store has is copied to the faster ones when it is loaded whole."""

    def __init__(self, tiers: Sequence[Store]) -> None:
        self._tiers = tiers

    def matched(self, keys: Sequence[bytes]) -> list[bool]:
        """As `Store.matched`."""
        found = [False] * len(keys)
        for tier in self._tiers:
            missing = [place for place, has in enumerate(found) if not has]
            for place, has in zip(missing, tier.matched([keys[p] for p in missing]), strict=True):
                found[place] = has
        return found

    def load(self, key: bytes, into: memoryview) -> int:
        """As `Store.load`."""
        for place, tier in enumerate(self._tiers):
            if size := tier.load(key, into):
                if size == len(into):
                    for faster in self._tiers[:place]:
                        faster.save(key, into)
                return size
        return 0

    def save(self, key: bytes, record: memoryview) -> None:
        """As `Store.save`."""
        for tier in self._tiers:
            tier.save(key, record)

    def drop(self, key: bytes) -> None:
        """As `Store.drop`."""
        for tier in self._tiers:
            tier.drop(key)

    def close(self) -> None:
        """As `Store.close`, of all."""
        for tier in self._tiers:
            tier.close()
