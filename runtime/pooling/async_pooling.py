"""Embeddings and scores for coroutines: texts are prepared in the caller's event loop or, where that takes long, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import NO_POOLING, Prompt
from gristmill.runtime.pooling.classes import ClassActivation, Classification
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.pooling.front import Embedding, Job, PoolingFront
from gristmill.runtime.pooling.pairs import Activation
from gristmill.runtime.pooling.scoring import Ranked, Score, ranking_job, scores_job
from gristmill.runtime.scheduler import QueueFull

R = TypeVar("R")
LONG = 4096
"""Characters of texts that are tokenized in a thread."""


class AsyncPooling:
    """The calls of an `AsyncEngine` for embeddings and scores.

    Args:
        compute: the results of inputs, from an engine.
        max_calls: unfinished calls beyond which one is refused; None = any number.
    """

    def __init__(
        self,
        front: PoolingFront,
        compute: Callable[[list[PoolingInput]], Awaitable[list[Tensor]]],
        max_calls: int | None,
    ) -> None:
        self.front, self._compute, self._max_calls = front, compute, max_calls
        self._calls = 0

    async def embed(self, texts: Any, **options: Any) -> list[Embedding]:
        """As `LLM.embed`."""
        return await self._run(texts, partial(self.front.embeddings, texts, **options))

    async def score(self, queries: Any, documents: Any, **options: Any) -> list[Score]:
        """As `LLM.score`."""
        return await self._run(
            (queries, documents), partial(scores_job, self.front, queries, documents, **options)
        )

    async def rerank(self, query: Any, documents: Any, top_n: int | None, **options: Any) -> list[Ranked]:
        """As `LLM.rerank`."""
        return await self._run(
            (query, documents), partial(ranking_job, self.front, query, documents, top_n, **options)
        )

    async def classify(self, texts: Any, **options: Any) -> list[Classification]:
        """As `LLM.classify`."""
        return await self._run(texts, partial(self.front.classifications, texts, **options))

    async def _run(self, texts: Any, prepare: Callable[[], Job[R]]) -> R:
        with self._counted():
            job = await asyncio.to_thread(prepare) if characters(texts) > LONG else prepare()
            return job.finish(await self._compute(job.inputs))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._max_calls is not None and self._calls >= self._max_calls:
            raise QueueFull(f"a call refused: {self._calls} calls have not ended, which is max_queued")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


class PoolingMethods:
    """The methods of `AsyncEngine` and `Replicas` for embeddings and scores. `_pooling` is None for a model that generates text."""

    _pooling: AsyncPooling | None = None

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[Embedding]:
        """The embedding of every text. Arguments and errors are those of `LLM.embed`; of several callers, texts are computed together. Being
        cancelled drops what is in no batch yet."""
        options = {
            "dimensions": dimensions,
            "normalize": normalize,
            "prompt": prompt,
            "prompt_name": prompt_name,
        }
        return await self._pools().embed(texts, **options, truncate=truncate)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: Activation | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Score]:
        """How well each document answers its query. Arguments and errors are those of `LLM.score`; otherwise as `embed`."""
        return await self._pools().score(
            queries, documents, activation=activation, instruction=instruction, truncate=truncate
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        activation: Activation | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Ranked]:
        """The documents by their score for a query, best first. Arguments and errors are those of `LLM.rerank`; otherwise as `embed`."""
        return await self._pools().rerank(
            query, documents, top_n, activation=activation, instruction=instruction, truncate=truncate
        )

    async def classify(
        self,
        texts: Prompt | tuple[str, str] | Sequence[Prompt | tuple[str, str]],
        *,
        activation: ClassActivation | None = None,
        truncate: bool = False,
    ) -> list[Classification]:
        """The classes of every text. Arguments and errors are those of `LLM.classify`; otherwise as `embed`."""
        return await self._pools().classify(texts, activation=activation, truncate=truncate)

    def _pools(self) -> AsyncPooling:
        """UsageError if the model generates text."""
        if self._pooling is None:
            raise UsageError(f"the model {NO_POOLING}")
        return self._pooling


def characters(texts: Any) -> int:
    """The characters of texts, and the token ids, however nested; other things have none."""
    if not isinstance(texts, Sequence):
        return 0
    return (
        len(texts)
        if isinstance(texts, str) or not texts or isinstance(texts[0], int)
        else sum(map(characters, texts))
    )
