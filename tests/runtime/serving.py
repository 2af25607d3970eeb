"""What tests of `AsyncEngine` have in common: engines over a fake runner, and a loop with a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.completion import Chunk
from gristmill.runtime.engine import Engine
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.fake_runner import FakeRunner, fake_engine

T = TypeVar("T")
LONG = SamplingParams(max_tokens=10_000, ignore_eos=True)


def run(main: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
    """Runs to the end within a bounded time."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, timeout)

    return asyncio.run(bounded())


def paced_engine(seconds: float = 0.001, **options: Any) -> tuple[Engine, FakeRunner]:
    """An engine whose steps take at least `seconds`, so that a busy test process observes requests before they end."""
    core, runner = fake_engine(**options)
    runner.before_step = lambda: time.sleep(seconds)
    return core, runner


def big_engine(**options: Any) -> tuple[Engine, FakeRunner]:
    return paced_engine(**{"num_blocks": 20_000, "max_batch_tokens": 4096, "max_seqs": 256, **options})


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.stream(prompt, params, **options)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
