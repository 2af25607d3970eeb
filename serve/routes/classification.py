"""POST /classify, as vLLM's server: classes of texts."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import beside
from gristmill.serve.routes.embeddings import several, truncates
from gristmill.serve.usage import pooling_usage


class ClassificationRequest(msgspec.Struct, kw_only=True):
    """The body: a text, token ids, or a list of such, in which two texts in a list are a pair. `use_activation`: false = logits. `truncate` is as of
    `LLM.classify`."""

    input: str | list[str | int | list[int | str]]
    model: str | None = None
    user: str | None = None
    use_activation: bool | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


async def classify(exchange: Exchange) -> None:
    """The most probable class of each text, and the probabilities of all."""
    request, service = await exchange.json(ClassificationRequest), exchange.service
    engine, model = service.require_pooling(), service.require_model(request.model)
    inputs = await beside(len(request.input), _inputs, request.input)
    exchange.watch()
    found = await engine.classify(
        inputs,
        activation="none" if request.use_activation is False else None,
        truncate=truncates(request.truncate, request.truncate_prompt_tokens),
    )
    await exchange.respond(
        {
            "id": f"classify-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {
                    "index": index,
                    "label": one.label,
                    "probs": one.values.tolist(),
                    "num_classes": len(one.labels),
                }
                for index, one in enumerate(found)
            ],
            "usage": pooling_usage(found),
        }
    )


def _inputs(given: str | list[Any]) -> list[Any]:
    return [one if isinstance(one, str) else _ids_or_pair(one) for one in several(given)]


def _ids_or_pair(given: list[Any]) -> list[int] | tuple[str, str]:
    """Token ids, or a pair of texts. ApiError if a list is neither."""
    if all(isinstance(one, int) for one in given):
        return given
    if len(given) == 2 and all(isinstance(one, str) for one in given):
        return given[0], given[1]
    raise ApiError(400, "a list within input is token ids, or a pair of texts", param="input")


ENDPOINTS = [Endpoint("POST", path, classify) for path in ("/classify", "/v1/classify")]
