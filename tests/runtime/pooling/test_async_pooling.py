"""Embeddings and scores on an AsyncEngine: many callers at once, limits, and what becomes of calls when the engine ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.scheduler import QueueFull, RequestTooLarge
from tests.runtime.pooling.encoder_cases import build, ids, text, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small encoder and a tokenizer."""
    path = tmp_path_factory.mktemp("bert")
    build("bert", path)
    write_tokenizer(path)
    return path


class Gate:
    """Holds the batches of an LLM until `open` is set."""

    def __init__(self, llm: LLM) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        engine: Any = llm.pooling.engine
        compute = engine.compute

        def held(inputs: Any) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return compute(inputs)

        engine.compute = held


def test_many_callers(folder: Path, make: Callable[..., LLM]) -> None:
    llm = make(folder, max_batch_tokens=64)
    texts = [[ids(1 + (i * j) % 9, i) for j in range(1 + i % 3)] for i in range(40)]
    expected = [llm.embed(each, dimensions=16) for each in texts]
    scores = llm.score(text(3), [text(2), text(5)])

    async def run() -> None:
        async with AsyncEngine(llm) as engine:
            calls = [engine.embed(each, dimensions=16) for each in texts]
            *made, scored, ranked = await asyncio.gather(
                *calls,
                engine.score(text(3), [text(2), text(5)]),
                engine.rerank(text(3), [text(2), text(5)], 1),
            )
            for each, known in zip(made, expected, strict=True):
                assert len(each) == len(known)
                for one, other in zip(each, known, strict=True):
                    assert float(np.abs(one.vector - other.vector).max()) < 1e-5
            assert [one.score for one in scored] == pytest.approx([one.score for one in scores], abs=1e-5)
            assert ranked[0].score == pytest.approx(max(one.score for one in scores), abs=1e-5)
            (long,) = await engine.embed(text(300) + " " * 5000)  # tokenized in a thread
            assert float(np.abs(long.vector - llm_embedding).max()) < 1e-5
            with pytest.raises(UsageError, match="AsyncEngine serves this model"):
                llm.embed([1])
            status = await engine.check_health(60)
            assert (status.state, status.waiting, status.num_blocks) == ("running", 0, 0)
            assert status.max_request_tokens == 320 and status.weight_bytes == llm.weight_bytes > 0

    llm_embedding = llm.embed(text(300))[0].vector
    asyncio.run(run())
    assert len(llm.embed([1])) == 1  # the engine is given back


def test_errors_are_those_of_llm(folder: Path, make: Callable[..., LLM], shared: Callable[..., LLM]) -> None:
    async def run() -> None:
        async with AsyncEngine(make(folder)) as engine:
            with pytest.raises(UsageError, match="from 0 to 299"):
                await engine.embed([300])
            with pytest.raises(RequestTooLarge):
                await engine.embed(ids(321))
            with pytest.raises(UsageError, match="one query"):
                await engine.rerank(["w5"], ["w5"])  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="call embed"):
                await engine.generate([1, 2])
            assert len(await engine.embed([1, 2])) == 1
        async with AsyncEngine(shared("docs-llama")) as engine:
            with pytest.raises(UsageError, match="task='embed'"):
                await engine.embed([1])

    asyncio.run(run())


def test_limits_on_what_waits(folder: Path, make: Callable[..., LLM]) -> None:
    """Without a limit of the engine on texts, there is one on calls; a cancelled call makes room, and is not computed."""
    llm = make(folder)
    gate = Gate(llm)

    async def run() -> None:
        async with AsyncEngine(llm, max_queued=2) as engine:
            first, second = (asyncio.create_task(engine.embed([[1], [2], [3]])) for _ in range(2))
            await asyncio.to_thread(gate.reached.wait, 30)
            with pytest.raises(QueueFull, match="max_queued"):
                await engine.embed([4])
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            third = asyncio.create_task(engine.embed([4]))
            await asyncio.sleep(0)
            gate.open.set()
            assert len(await first) == 3 and len(await third) == 1

    asyncio.run(run())
    tight = make(folder, max_queued=2)

    async def refused() -> None:
        async with AsyncEngine(tight) as engine:
            with pytest.raises(QueueFull, match="max_queued = 2"):
                await engine.embed([[1], [2], [3]])
            assert len(await engine.embed([[1], [2]])) == 2

    asyncio.run(refused())


def test_pause_drain_close(folder: Path, make: Callable[..., LLM]) -> None:
    llm = make(folder)

    async def run() -> None:
        engine = AsyncEngine(llm)
        await engine.pause()
        waits = asyncio.create_task(engine.embed([1]))
        await asyncio.sleep(0.05)
        assert not waits.done() and (await engine.check_health(60)).state == "paused"
        await engine.resume()
        assert len(await waits) == 1
        await engine.pause()
        dropped = asyncio.create_task(engine.embed([1]))
        await asyncio.sleep(0.05)
        await engine.pause("abort")
        with pytest.raises(asyncio.CancelledError):
            await dropped
        await engine.drain()
        with pytest.raises(EngineDraining):
            await engine.embed([1])
        await engine.drained()
        assert "draining" in engine.dump()
        await engine.close()
        with pytest.raises(EngineDeadError):
            await engine.embed([1])

    asyncio.run(run())


def test_a_failed_batch_is_that_of_its_callers(folder: Path, make: Callable[..., LLM]) -> None:
    llm = make(folder)
    engine: Any = llm.pooling.engine
    compute = engine.compute

    def failing(inputs: Any) -> Any:
        if any(13 in each.ids for each in inputs):
            raise ArithmeticError("13")
        return compute(inputs)

    engine.compute = failing

    async def run() -> None:
        async with AsyncEngine(llm) as served:
            with pytest.raises(ArithmeticError):
                await served.embed([13])
            assert len(await served.embed([1])) == 1

    asyncio.run(run())


def test_a_batch_that_hangs(folder: Path, make: Callable[..., LLM]) -> None:
    llm = make(folder)
    gate = Gate(llm)

    async def run() -> None:
        engine = AsyncEngine(llm, watchdog_seconds=0.3)
        calls = [asyncio.create_task(engine.embed([[1], [2]])) for _ in range(2)]
        for call in calls:
            with pytest.raises(EngineDeadError, match=r"a step has not ended for 0\.3 s"):
                await call
        assert calls[0].exception() is not calls[1].exception()
        gate.open.set()
        await engine.close()

    asyncio.run(run())
