"""The engines of a server: replicas of the model, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.runtime.llm import Prompt
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.serve.service import Service


class Engines(Replicas):
    """Replicas as a server uses them."""

    _streams = 0

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """As `Replicas.stream`."""
        self._streams += 1
        try:
            async for chunk in super().stream(prompt, params, priority=priority):
                yield chunk
        finally:
            self._streams -= 1

    async def explain(self) -> list[Any]:
        """Unknown."""
        return []

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until no request is unfinished, at most `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while self._streams and (deadline is None or loop.time() < deadline):
            await asyncio.sleep(0.02)


def open_engines(model: str | Path, options: Mapping[str, Any]) -> Callable[[Service], Engines]:
    """What makes the engines of a service; it blocks until the model is loaded.

    Args:
        options: of `EngineConfig`, as they were given.
    """

    def load(service: Service) -> Engines:
        config = service.config
        return Engines(model, config.replicas, route=config.route, **options)

    return load
