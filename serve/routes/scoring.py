"""POST /generative_scoring, as vLLM's server, and /v1/score, as SGLang's: how likely given tokens come next after each of some prompts. A model
that scores pairs of texts answers /v1/score as vLLM's server does (`reranking`).

The probabilities are exact, and of any token. A request for each prompt has the CANDIDATES most likely tokens; for each label that is not
among them, a request that allows this label alone has its log-probability, which is of the model's own logits. It finds the prompt in the
prefix cache. To read a whole vocabulary of 151,936 tokens takes 100 ms of the host for each prompt, and as long for every other request in
the batch that wants log-probabilities; 256 tokens take 0.4 ms.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import msgspec

from gristmill.runtime.sampling_params import SamplingParams
from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import Generation, beside, room
from gristmill.serve.routes.reranking import score_pairs
from gristmill.serve.token_ids import check_ids

CANDIDATES = 256
MAX_LABELS = 256
AT_ONCE = 16
"""Requests in the engine that belong to one request of a client."""


class ScoreFields(msgspec.Struct, kw_only=True):
    """The fields of both routes: texts, or token ids."""

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int] | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    priority: int | None = None


class GenerativeScoring(ScoreFields, kw_only=True):
    """The body of /generative_scoring."""

    apply_softmax: bool | None = True


class Score(ScoreFields, kw_only=True):
    """The body of /v1/score."""

    apply_softmax: bool | None = False


async def generative_scoring(exchange: Exchange) -> None:
    """For each item the probability of the first label, and those of all labels."""
    request = await exchange.json(GenerativeScoring)
    scorer = _Scorer(exchange, request)
    prompts = await scorer.prompts(joined=False)
    rows = await scorer.score(prompts, bool(request.apply_softmax))
    await exchange.respond(
        {
            "id": f"generative-scoring-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": scorer.model,
            "data": [
                {"index": index, "object": "score", "score": row[0], "probabilities": row}
                for index, row in enumerate(rows)
            ],
            "usage": _usage(prompts),
        }
    )


async def score(exchange: Exchange) -> None:
    """For each item the probabilities of all labels; of a model that scores pairs of texts, their scores."""
    if exchange.service.pools:
        await score_pairs(exchange)
        return
    request = await exchange.json(Score)
    scorer = _Scorer(exchange, request)
    prompts = await scorer.prompts(joined=True)
    rows = await scorer.score(prompts, bool(request.apply_softmax))
    await exchange.respond(
        {"object": "scoring", "scores": rows, "model": scorer.model, "usage": _usage(prompts)}
    )


def _usage(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    count = sum(len(ids) for ids in prompts)
    return {
        "prompt_tokens": count,
        "completion_tokens": len(prompts),
        "total_tokens": count + len(prompts),
    }


class _Scorer:
    """One request: checked, and then computed."""

    def __init__(self, exchange: Exchange, request: ScoreFields) -> None:
        self._exchange, self._request = exchange, request
        service = exchange.service
        service.require_engine()
        self.model = service.require_model(request.model)
        if not request.label_token_ids:
            raise ApiError(
                400,
                "label_token_ids is needed: the ids of the tokens whose probabilities are wanted",
                param="label_token_ids",
            )
        self._labels = request.label_token_ids
        if len(self._labels) > MAX_LABELS:
            raise ApiError(
                400,
                f"label_token_ids: {len(self._labels)} are more than {MAX_LABELS}",
                param="label_token_ids",
            )
        self._items = [request.items] if isinstance(request.items, str) else request.items
        most = service.config.max_choices
        if not 1 <= len(self._items) <= most:
            raise ApiError(400, f"items must be 1 to {most}, got {len(self._items)}", param="items")
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def prompts(self, joined: bool) -> list[list[int]]:
        """The token ids of query and item, one after the other. `joined`: texts are put together before they are tokenized."""
        query = self._request.query
        await check_ids(self._exchange.service, "label_token_ids", self._labels, "label_token_ids")
        prompts = []
        for item in self._items:
            first, second = (item, query) if self._request.item_first else (query, item)
            if joined and isinstance(first, str) and isinstance(second, str):
                ids = await self._ids(first + second, True)
            else:
                ids = [*await self._ids(first, True), *await self._ids(second, False)]
            if not ids:
                raise ApiError(400, "query and item are both empty", param="items")
            room(self._exchange.service.max_model_len, len(ids), 1)
            prompts.append(ids)
        return prompts

    async def _ids(self, given: str | list[int], begins: bool) -> list[int]:
        service = self._exchange.service
        if not isinstance(given, str):
            await check_ids(service, "query and items", given, "query")
            return given
        special = begins and self._request.add_special_tokens is not False
        ids: list[int] = await beside(len(given), service.tokenizer.encode, given, special)
        return ids

    async def score(self, prompts: Sequence[Sequence[int]], softmax: bool) -> list[list[float]]:
        """For each prompt the probabilities of the labels; `softmax`: among each other."""
        self._exchange.watch()
        tasks = [asyncio.ensure_future(self._prompt(number, ids)) for number, ids in enumerate(prompts)]
        try:
            rows = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [_probabilities([found[label] for label in self._labels], softmax) for found in rows]

    async def _prompt(self, number: int, ids: Sequence[int]) -> dict[int, float]:
        """Log-probabilities of at least the labels, by token id."""
        name = f"{self._exchange.request_id}.{number}"
        count = min(CANDIDATES, self._exchange.service.vocab_size)
        found = await self._next(ids, SamplingParams(max_tokens=1, logprobs=count), name)
        missing = [label for label in dict.fromkeys(self._labels) if label not in found]
        for label in missing:
            only = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=[label])
            found |= await self._next(ids, only, f"{name}.{label}")
        return found

    async def _next(self, ids: Sequence[int], params: SamplingParams, name: str) -> dict[int, float]:
        """Log-probabilities of the token that comes next, and of the candidates."""
        found: dict[int, float] = {}
        async with self._slots:
            generation = Generation(
                self._exchange, ids, params, priority=self._request.priority or 0, name=name
            )
            async for part in generation.parts():
                for entry in part.chunk.logprobs or ():
                    found = {**dict(entry.top), entry.token_id: entry.logprob}
        return found


def _probabilities(logprobs: Sequence[float], softmax: bool) -> list[float]:
    if not softmax:
        return [math.exp(one) for one in logprobs]
    peak = max(logprobs)
    if peak == -math.inf:
        return [0.0] * len(logprobs)
    weights = [math.exp(one - peak) for one in logprobs]
    return [weight / sum(weights) for weight in weights]


ENDPOINTS = [
    Endpoint("POST", "/generative_scoring", generative_scoring),
    Endpoint("POST", "/v1/score", score),
]
