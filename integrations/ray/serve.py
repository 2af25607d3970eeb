"""A deployment for Ray Serve: streams, cancellation, health; over HTTP and by handle."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gristmill.integrations.options import engine_options
from gristmill.integrations.ray.params import sampling_params
from gristmill.integrations.ray.resources import resources
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.completion import Chunk, Completion
from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.scheduler import QueueFull, RequestTooLarge

HEALTH_SECONDS = 60.0
"""How long a replica may take to answer between two steps before it counts as unhealthy. First steps may compile kernels."""


MAX_ONGOING = 1024
"""Requests that Ray Serve gives to one replica at a time (its own default is 5). The engine batches and queues by itself."""


class Server:
    """One engine per replica. A caller that leaves, or cancels, ends its request.

    Over HTTP: POST ``{"prompt": text or token ids, "params": {...}, "stream": false, "priority": 0}``. The answer is
    ``{"completions": [...]}``, or, with stream, server-sent events of one chunk each and ``[DONE]``. Status 400: an invalid request; 503:
    the queue is full or the replica drains; 500: the engine has failed, with its `ErrorInfo.code`. GET: the status of the engine.

    Args:
        model: a directory or a GGUF file.
        options: options of `gristmill.LLM`, such as ``{"quant": "int4_g128", "max_queued": 256}``.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None) -> None:
        self.engine = AsyncEngine(LLM(model, **engine_options(options or {})))

    async def generate(
        self, prompt: str | list[int], params: Mapping[str, Any] | None = None, priority: int = 0
    ) -> list[dict[str, Any]]:
        """The completions of one prompt, as values: text, token_ids, finish_reason, choice, stop_reason, error, and logprobs if asked
        for."""
        completions = await self.engine.generate(prompt, sampling_params(params), priority=priority)
        return [_values(completion) for completion in completions]

    async def stream(
        self, prompt: str | list[int], params: Mapping[str, Any] | None = None, priority: int = 0
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of one prompt: ``handle.options(stream=True).stream.remote(prompt)``."""
        chunks = self.engine.stream(prompt, sampling_params(params), priority=priority)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield _values(chunk)

    async def status(self) -> dict[str, Any]:
        """Capacity and load: the fields of `gristmill.EngineStatus`."""
        return asdict(await self.engine.check_health(HEALTH_SECONDS))

    async def check_health(self) -> None:
        """Ray Serve calls it, and replaces a replica for which it raises."""
        await self.engine.check_health(HEALTH_SECONDS)

    async def __call__(self, request: Request) -> Response:
        """Over HTTP."""
        try:
            if request.method == "GET":
                return JSONResponse(await self.status())
            prompt, params, stream, priority = _read(await request.body())
            if not stream:
                return JSONResponse({"completions": await self.generate(prompt, params, priority)})
            chunks = self.stream(prompt, params, priority)
            first = await anext(chunks)  # what is refused is refused before the answer begins
        except (UsageError, RequestTooLarge) as error:
            return JSONResponse({"error": str(error)}, 400)
        except (QueueFull, EngineDraining) as error:
            return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
        except EngineDeadError as error:
            return JSONResponse({"error": str(error), "code": error.info.code}, 500)
        return StreamingResponse(_events(first, chunks), media_type="text/event-stream")


async def _events(
    first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        yield f"data: {json.dumps(first)}\n\n"
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _read(body: bytes) -> tuple[Any, Any, bool, int]:
    """(prompt, params, stream, priority) of a request's body."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise UsageError(f"the body must be JSON: {error}") from error
    known = {"prompt", "params", "stream", "priority"}
    if not isinstance(data, dict) or "prompt" not in data or set(data) - known:
        raise UsageError(
            f"the body must be an object with prompt and, if needed, {', '.join(sorted(known - {'prompt'}))}"
        )
    stream, priority = data.get("stream", False), data.get("priority", 0)
    if not isinstance(stream, bool) or type(priority) is not int:
        raise UsageError(f"stream must be a boolean and priority an integer, got {stream!r} and {priority!r}")
    return data["prompt"], data.get("params"), stream, priority


def _values(part: Completion | Chunk) -> dict[str, Any]:
    """The value as JSON, without entries that are None."""
    values = {name: value for name, value in asdict(part).items() if value is not None}
    values.pop("prompt_ids", None)
    values.pop("index", None)
    return values


def build(arguments: Mapping[str, str]) -> serve.Application:
    """``serve run gristmill.integrations.ray:build model=MODEL quant=int4_g128``: an application of one deployment, whose replicas have a
    GPU for each of ``tensor_parallel`` where the cluster has GPUs.

    Args:
        arguments: ``model``, and options of `gristmill.LLM`, which may be texts.

    Raises:
        UsageError: there is no model, or an option is unknown.
    """
    if "model" not in arguments:
        raise UsageError("model=MODEL is missing: a directory or a GGUF file")
    options = engine_options({name: value for name, value in arguments.items() if name != "model"})
    deployment = serve.deployment(
        Server, max_ongoing_requests=MAX_ONGOING, ray_actor_options=resources(options)
    )
    return deployment.bind(arguments["model"], options)
