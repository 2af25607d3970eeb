"""What Dynamo's router and metrics learn from the engine: its load after each step."""

from __future__ import annotations

from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot
from prometheus_client import CollectorRegistry

from gristmill.runtime.engine import Engine
from gristmill.runtime.metrics import Metrics, Timing


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
