"""POST /v1/embeddings, as OpenAI's API."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import beside
from gristmill.serve.usage import pooling_usage

MAX_INPUTS = 2048
"""Texts of one request, as of OpenAI's API."""
FORMATS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body. `truncate`, `normalize`, `prompt` and `prompt_name` are as of `LLM.embed`; truncate_prompt_tokens = -1 is vLLM's name of
    `truncate`."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


async def embeddings(exchange: Exchange) -> None:
    """A vector for each text: numbers, or float32, little-endian, in base64. Of a model with late interaction, one for each token."""
    request, service = await exchange.json(EmbeddingRequest), exchange.service
    engine, model = service.require_pooling(), service.require_model(request.model)
    if request.encoding_format not in (None, *FORMATS):
        raise ApiError(
            400,
            f"encoding_format must be one of {', '.join(FORMATS)}, got {request.encoding_format!r}",
            param="encoding_format",
        )
    inputs = await beside(len(request.input), several, request.input)
    exchange.watch()
    found = await engine.embed(
        inputs,
        dimensions=request.dimensions,
        normalize=request.normalize,
        prompt=request.prompt,
        prompt_name=request.prompt_name,
        truncate=truncates(request.truncate, request.truncate_prompt_tokens),
    )
    coded = request.encoding_format == "base64"
    if coded and found[0].vector.ndim > 1:
        raise ApiError(
            400,
            f"{model} has a vector for each token, which base64 has no shape for: encoding_format must be float",
            param="encoding_format",
        )
    await exchange.respond(
        {
            "object": "list",
            "model": model,
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _base64(one.vector) if coded else one.vector.tolist(),
                }
                for index, one in enumerate(found)
            ],
            "usage": pooling_usage(found),
        }
    )


def several(given: str | list[Any]) -> list[Any]:
    """The texts, or lists of token ids, of a request.

    Raises:
        ApiError: there are none, too many, or texts beside token ids.
    """
    if isinstance(given, str) or (given and all(isinstance(one, int) for one in given)):
        return [given]
    if any(isinstance(one, int) for one in given):
        raise ApiError(400, "input is a text, token ids, or a list of such: not a mixture", param="input")
    if not 1 <= len(given) <= MAX_INPUTS:
        raise ApiError(400, f"input must be 1 to {MAX_INPUTS} texts, got {len(given)}", param="input")
    return given


def truncates(truncate: bool | None, tokens: int | None) -> bool:
    """Whether texts are cut to what the model takes."""
    if tokens not in (None, -1):
        raise ApiError(
            400,
            f"truncate_prompt_tokens must be -1, the length that the model takes, got {tokens}",
            param="truncate_prompt_tokens",
        )
    return bool(truncate) or tokens == -1


def _base64(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ENDPOINTS = [Endpoint("POST", "/v1/embeddings", embeddings)]
