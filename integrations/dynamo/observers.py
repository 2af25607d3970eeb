"""What Dynamo's router and metrics learn from the engine: events of the prefix cache, and its load after each step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot
from prometheus_client import CollectorRegistry

from gristmill.runtime.engine import Engine
from gristmill.runtime.kv_cache.events import BlockRemoved, BlockStored, CacheEvent
from gristmill.runtime.metrics import Metrics, Timing


class CacheEvents:
    """Hands events to Dynamo's publisher, from the engine's thread; those before there is one are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publisher: Any = None
        self._waiting: list[dict[str, Any]] = []
        self._stored: set[int] = set()

    def attach(self, publisher: Any) -> None:
        """From now on there is a publisher."""
        with self._lock:
            self._publisher, waiting, self._waiting = publisher, self._waiting, []
            if waiting:
                publisher.publish_batch(waiting)

    def close(self) -> None:
        """Publish nothing any more."""
        with self._lock:
            self._publisher = None

    def __call__(self, events: Sequence[CacheEvent]) -> None:
        inputs = [self._input(event) for event in events]
        with self._lock:
            if self._publisher is None:
                self._waiting += inputs
            else:
                self._publisher.publish_batch(inputs)

    def _input(self, event: CacheEvent) -> dict[str, Any]:
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
        return {"type": "removed", "block_hashes": gone}


class Load(Metrics):
    """Prometheus metrics under the prefix ``gristmill``, and snapshots for Dynamo's router."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        super().__init__(model_name, self.registry, prefix="gristmill")
        self.publisher: Any = None
        self._queries = self._hits = 0

    def scheduled(self, timing: Timing, cached_tokens: int) -> None:
        """A request is in a step for the first time."""
        super().scheduled(timing, cached_tokens)
        self._queries += timing.prompt_tokens
        self._hits += cached_tokens

    def step(self, engine: Engine) -> None:
        """A step of the engine has ended."""
        super().step(engine)
        if self.publisher is not None:
            self.publisher.publish(0, self.snapshot(engine))

    def snapshot(self, engine: Engine) -> ComponentSnapshot:
        """The load of the engine."""
        status = engine.status()
        return ComponentSnapshot(
            kv_used_blocks=status.used_blocks,
            kv_total_blocks=status.num_blocks,
            gpu_cache_usage=status.used_blocks / status.num_blocks,
            kv_cache_hit_rate=self._hits / self._queries if self._queries else None,
            dp_rank=0,
        )
