"""Events of the prefix cache for Dynamo's router. Needs nothing of Dynamo but the publisher that it hands over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from gristmill.runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent


class CacheEvents:
    """Hands events to Dynamo's publisher, from the engine's thread. Nothing is kept for a publisher that is not there yet: when it comes,
    it gets what the cache holds, and then what changes.

    Args:
        resync: asks the engine for an `AllBlocksCleared` and the blocks that it holds, as `AsyncEngine.resync_cache_events` does.
    """

    def __init__(self, resync: Callable[[], None]) -> None:
        self._resync = resync
        self._lock = threading.Lock()
        self._publisher: Any = None
        self._synced = False  # the publisher has got what the cache holds
        self._stored: set[int] = set()  # blocks that it has

    def attach(self, publisher: Any) -> None:
        """From now on there is a publisher."""
        with self._lock:
            self._publisher, self._synced = publisher, False
            self._stored.clear()
        self._resync()

    def close(self) -> None:
        """Publish nothing any more."""
        with self._lock:
            self._publisher = None
            self._stored.clear()

    def __call__(self, events: Sequence[CacheEvent]) -> None:
        with self._lock:
            if self._publisher is None:
                return
            inputs: list[dict[str, Any]] = []
            for event in events:
                self._synced |= isinstance(event, AllBlocksCleared)
                if self._synced and (one := self._input(event)) is not None:
                    inputs.append(one)
            if inputs:
                self._publisher.publish_batch(inputs)

    def _input(self, event: CacheEvent) -> dict[str, Any] | None:
        """The event for Dynamo; None if there is nothing to say."""
        if isinstance(event, BlockStored):
            self._stored.update(event.block_hashes)
            return {
                "type": "stored",
                "token_ids": event.token_ids,
                "num_block_tokens": [event.block_size] * len(event.block_hashes),
                "block_hashes": event.block_hashes,
                "parent_hash": event.parent_block_hash,
            }
        # Dynamo has no event for all blocks.
        gone = event.block_hashes if isinstance(event, BlockRemoved) else sorted(self._stored)
        self._stored.difference_update(gone)
        return {"type": "removed", "block_hashes": gone} if gone else None
