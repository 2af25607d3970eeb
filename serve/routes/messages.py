"""POST /v1/messages and its count_tokens, as Anthropic's API."""

from __future__ import annotations

from typing import Any

from gristmill.serve.anthropic_events import Event, MessageEvents, MessageFold
from gristmill.serve.anthropic_messages import MessagesRequest, PromptFields, prompt
from gristmill.serve.app import Endpoint
from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError, anthropic_shape
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import Generation, beside, continued, room
from gristmill.serve.sampling import sampling_params


async def count_tokens(exchange: Exchange) -> None:
    """The tokens of a prompt."""
    request, service = await exchange.json(PromptFields), exchange.service
    service.require_model(request.model)
    conversation, options = prompt(service, request)
    ids = await beside(exchange.size, service.chat.encode, conversation, options)
    await exchange.respond({"input_tokens": len(ids)})


async def messages(exchange: Exchange) -> None:
    """Answer, whole or as a stream."""
    request, service = await exchange.json(MessagesRequest), exchange.service
    service.require_engine()
    model = service.require_model(request.model)
    thinking = request.thinking
    if thinking is not None and (thinking.budget_tokens or 0) >= request.max_tokens:
        raise ApiError(
            400,
            f"max_tokens ({request.max_tokens}) must be more than thinking.budget_tokens ({thinking.budget_tokens})",
            param="max_tokens",
        )
    conversation, options = prompt(service, request)
    ids = await beside(exchange.size, service.chat.encode, conversation, options)
    tokens = room(service.max_model_len, len(ids), request.max_tokens)
    params = sampling_params(service, request.sampling(), max_tokens=tokens, logprobs=None)
    exchange.watch()
    generation = continued(
        exchange, options, ids, params, priority=request.priority, interval_ms=request.stream_interval_ms
    )
    wanted = "dropped" if thinking is None or thinking.type == "disabled" else "shown"
    events = MessageEvents(
        {
            "id": f"msg_{exchange.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        },
        thoughts="omitted" if wanted == "shown" and thinking and thinking.display == "omitted" else wanted,
        stops=request.stop_sequences or (),
        full="max_tokens" if tokens == request.max_tokens else "model_context_window_exceeded",
        usage=lambda: _usage(generation),
    )
    fold = None if request.stream else MessageFold()
    exchange.streams = fold is None
    some = events.start()
    async for part in generation.parts():
        some += events.of(part)
        if part.finish is not None:
            exchange.record["finish"] = [part.finish]
        if fold is not None:
            fold.add(some)
        elif some:
            await exchange.start_events()
            await exchange.write(b"".join(map(_written, some)))
        some = []
    if fold is None:
        await exchange.end()
    else:
        await exchange.respond(fold.message)


def _written(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "input_tokens": generation.prompt_tokens - generation.cached_tokens,
        "output_tokens": generation.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.cached_tokens,
        "output_tokens_details": {"thinking_tokens": generation.reasoning_tokens},
    }


ENDPOINTS = [
    Endpoint("POST", "/v1/messages", messages, shape=anthropic_shape),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, shape=anthropic_shape),
]
