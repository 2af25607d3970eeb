"""Embeddings and scores by several processes: the results of one, deaths, callers that leave, and calls that such models do not have."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import QueueFull
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.pooling.encoder_cases import build, ids, text, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small encoder and a tokenizer."""
    path = tmp_path_factory.mktemp("bert")
    build("bert", path)
    write_tokenizer(path)
    return path


@pytest.fixture
def start(policy: Policy, folder: Path) -> Iterator[Callable[..., Replicas]]:
    """Starts replicas, which are ended after the test."""
    fronts: list[Replicas] = []

    def make(count: int, model: Path = folder, **options: Any) -> Replicas:
        fronts.append(
            Replicas(model, count, dtype="fp32", policy=policy, timeout=30.0, warm="off", **options)
        )
        return fronts[-1]

    yield make
    for front in fronts:
        front.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 60)

    asyncio.run(limited())


def test_results_of_one_and_a_death(
    start: Callable[..., Replicas], folder: Path, make: Callable[..., LLM]
) -> None:
    llm, replicas = make(folder), start(2)
    texts = [[text(1 + (i * j) % 9, i) for j in range(1 + i % 3)] for i in range(24)]
    expected = [llm.embed(each, dimensions=16) for each in texts]
    scores = [one.score for one in llm.score(text(3), [text(2), text(5)])]

    async def main() -> None:
        for dies in (False, True):
            calls = asyncio.gather(*(replicas.embed(each, dimensions=16) for each in texts))
            if dies:
                await asyncio.sleep(0)  # the calls are on their way
                os.kill(replicas._replicas[0].child.process.pid, signal.SIGKILL)
            for each, known in zip(await calls, expected, strict=True):
                for one, other in zip(each, known, strict=True):
                    assert float(np.abs(one.vector - other.vector).max()) < 1e-5
                    assert one.prompt_tokens == other.prompt_tokens
        found = await replicas.score(text(3), [text(2), text(5)])
        assert [one.score for one in found] == pytest.approx(scores, abs=1e-5)
        ranked = await replicas.rerank(text(3), [text(2), text(5)], 1)
        assert ranked[0].score == pytest.approx(max(scores), abs=1e-5)
        states = await replicas.status()
        assert isinstance(states[0], ReplicaError)
        assert not isinstance(states[1], BaseException) and states[1].state == "running"
        assert replicas._replicas[1].unfinished == 0
        os.kill(replicas._replicas[1].child.process.pid, signal.SIGKILL)
        with pytest.raises(ReplicaError, match="no replica is left|died"):
            await replicas.embed("the end")

    run(main)


def test_a_caller_that_leaves_and_a_full_queue(start: Callable[..., Replicas]) -> None:
    replicas = start(1, max_queued=2, max_batch_tokens=32)
    many = [ids(30, i) for i in range(400)]

    async def waiting() -> int:
        [state] = await replicas.status()
        assert not isinstance(state, BaseException)
        return state.waiting

    async def main() -> None:
        await replicas.pause()
        first = asyncio.ensure_future(replicas.embed(many))
        second = asyncio.ensure_future(replicas.embed([ids(4)]))
        while replicas._replicas[0].unfinished < 401:  # both have been sent
            await asyncio.sleep(0)
        assert await waiting() == 401
        with pytest.raises(QueueFull, match="max_queued"):
            await replicas.embed([ids(3)])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await replicas.resume()
        assert len(await second) == 1 and await waiting() == 0

    run(main)


def test_classes(start: Callable[..., Replicas], make: Callable[..., LLM], tmp_path: Path) -> None:
    build("bert classifier", tmp_path)
    write_tokenizer(tmp_path)
    [known] = make(tmp_path).classify([(text(3), text(5))])
    replicas = start(1, tmp_path)

    async def main() -> None:
        [found] = await replicas.classify([(text(3), text(5))])
        assert float(np.abs(found.values - known.values).max()) < 1e-5
        assert (found.label, found.labels) == (known.label, known.labels)

    run(main)


def test_what_is_refused(start: Callable[..., Replicas]) -> None:
    pooling, generating = start(1), start(1, MODELS / LLAMA, num_blocks=64)

    async def main() -> None:
        with pytest.raises(UsageError, match="generates no text: call embed"):
            await pooling.generate([1, 2], SamplingParams(max_tokens=2))
        with pytest.raises(UsageError, match=r"task='embed'"):
            await generating.embed("text")
        [error] = await pooling.sleep()
        assert isinstance(error, UsageError) and "sleep is not for a model for embeddings" in str(error)
        with pytest.raises(UsageError, match="the text is empty"):
            await pooling.embed([[]])
        assert await pooling.pause() == [None] and await pooling.resume() == [None]
        assert len(await pooling.embed("text")) == 1
        [rows] = await pooling.explain()
        assert not isinstance(rows, BaseException) and {"linear", "layer_norm"} <= {row["op"] for row in rows}
        assert await pooling.drain(5.0) == [None]

    run(main)
