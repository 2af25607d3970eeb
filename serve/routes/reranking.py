"""Scores of pairs of texts: /rerank as of Jina's and Cohere's APIs, and the pairs of vLLM's /score."""

from __future__ import annotations

import time

import msgspec

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.routes.embeddings import MAX_INPUTS, truncates
from gristmill.serve.usage import pooling_usage


class Document(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """The body of /rerank. `instruction` and `truncate` are as of `LLM.rerank`."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = True
    instruction: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


class PairRequest(msgspec.Struct, kw_only=True):
    """The body of /score for a model that scores: a text and one or several others, or as many of both."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    instruction: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


async def rerank(exchange: Exchange) -> None:
    """The documents by their score for the query, best first."""
    request, service = await exchange.json(RerankRequest), exchange.service
    engine, model = service.require_pooling(), service.require_model(request.model)
    texts = [one if isinstance(one, str) else one.text for one in request.documents]
    _few("documents", texts)
    exchange.watch()
    ranked = await engine.rerank(
        request.query,
        texts,
        request.top_n,
        instruction=request.instruction,
        truncate=truncates(request.truncate, request.truncate_prompt_tokens),
    )
    shown = request.return_documents is not False
    await exchange.respond(
        {
            "id": f"rerank-{exchange.request_id}",
            "model": model,
            "results": [
                {
                    "index": one.index,
                    **({"document": {"text": texts[one.index]}} if shown else {}),
                    "relevance_score": one.score,
                }
                for one in ranked
            ],
            "usage": pooling_usage(ranked),
        }
    )


async def score_pairs(exchange: Exchange) -> None:
    """A score for each pair."""
    request, service = await exchange.json(PairRequest), exchange.service
    engine, model = service.require_pooling(), service.require_model(request.model)
    for name, texts in (("text_1", request.text_1), ("text_2", request.text_2)):
        _few(name, [texts] if isinstance(texts, str) else texts)
    exchange.watch()
    found = await engine.score(
        request.text_1,
        request.text_2,
        instruction=request.instruction,
        truncate=truncates(request.truncate, request.truncate_prompt_tokens),
    )
    await exchange.respond(
        {
            "id": f"score-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": one.score} for index, one in enumerate(found)
            ],
            "usage": pooling_usage(found),
        }
    )


def _few(name: str, texts: list[str]) -> None:
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise ApiError(400, f"{name} must be 1 to {MAX_INPUTS} texts, got {len(texts)}", param=name)


ENDPOINTS = [
    *(Endpoint("POST", path, rerank) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
    Endpoint("POST", "/score", score_pairs),
]
