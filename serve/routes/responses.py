"""/v1/responses, as OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import RETRY_AFTER, ApiError, api_error
from gristmill.serve.exchange import Exchange, encode
from gristmill.serve.generation import Generation
from gristmill.serve.logprobs import chat_logprobs
from gristmill.serve.responses.events import Event, ResponseEvents, usage
from gristmill.serve.responses.items import Item, conversation, input_items
from gristmill.serve.responses.request import (
    ResponsesRequest,
    check,
    encoded,
    head,
    options_of,
    sampling,
)
from gristmill.serve.responses.store import ResponseStore, Stored, owner_of, store_of
from gristmill.serve.service import Service


async def create(exchange: Exchange) -> None:
    """Answer: whole, as a stream, or in the background."""
    request, service = await exchange.json(ResponsesRequest), exchange.service
    service.require_engine()
    model = service.require_model(request.model)
    check(request)
    store = _wanted_store(service, request)
    items = _items(exchange, request)
    messages = conversation(items, request.instructions)
    options = options_of(service, request)
    ids = await encoded(service, request, messages, options)
    params = sampling(service, request, len(ids))
    generation = Generation(
        exchange,
        ids,
        service.chat.params(params, options),
        lambda: service.chat.parser(options, ids),
        priority=request.priority or 0,
        interval_ms=request.stream_interval_ms,
    )
    events = ResponseEvents(
        head(request, model, params),
        lambda: usage(generation),
        (lambda chunk: chat_logprobs(service, [chunk])["content"]) if request.wants_logprobs else None,
    )
    stored = Stored(owner_of(exchange), events.response, items, background=bool(request.background))
    if request.background and store is not None:
        await _in_background(exchange, store, stored, generation, events)
        return
    exchange.watch()
    if request.stream:
        await _stream(exchange, generation, events)
    else:
        events.start()
        async for part in generation.parts():
            events.of(part)
    exchange.record["finish"] = [events.response["status"]]
    if store is not None:
        stored.response = events.response
        store.put(stored)
    if not request.stream:
        await exchange.respond(events.response)


async def _stream(exchange: Exchange, generation: Generation, events: ResponseEvents) -> None:
    exchange.streams = True
    exchange.on_error = lambda error: b"".join(map(_written, events.failed(error)))
    begun = False
    async for part in generation.parts():
        some = events.of(part) if begun else events.start() + events.of(part)
        if not begun:
            begun = True
            await exchange.start_events()
        if some:
            await exchange.write(b"".join(map(_written, some)))
    await exchange.end()


def _written(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


async def _in_background(
    exchange: Exchange, store: ResponseStore, stored: Stored, generation: Generation, events: ResponseEvents
) -> None:
    """Respond at once, and generate whether the client stays or leaves."""
    service, response = exchange.service, events.response
    # The server waits for what is active when it drains, and ends it when its time is over.
    job = Exchange(service, exchange.scope, _nowhere, _nowhere, exchange.request_id, exchange.shape)
    events.start()
    stored.task = job.task = asyncio.ensure_future(_work(job, store, stored, generation, events))
    if not store.put(stored):
        job.task.cancel()
        raise ApiError(
            429,
            "no room for another response in the background (store_responses, store_bytes)",
            type="rate_limit_error",
            code="store_full",
            headers={"retry-after": str(RETRY_AFTER)},
        )
    service.active.add(job)
    await exchange.respond(response)


async def _work(
    job: Exchange, store: ResponseStore, stored: Stored, generation: Generation, events: ResponseEvents
) -> None:
    error: str | None = None
    try:
        async for part in generation.parts():
            events.of(part)
    except asyncio.CancelledError:
        events.cancelled()
    except Exception as failure:
        events.failed(api_error(failure))
        error = f"{type(failure).__name__}: {failure}"
    finally:
        job.service.active.discard(job)
        stored.task = None
        if store.holds(stored):
            store.put(stored)
        status = events.response["status"]
        job.service.log.write("response", request_id=job.request_id, status=status, error=error)


async def _nowhere(message: Any = None) -> Any:
    raise RuntimeError("a response in the background has no client")


def _wanted_store(service: Service, request: ResponsesRequest) -> ResponseStore | None:
    """Where the response is kept; None = nowhere. ApiError: it must be kept, and is not."""
    store = service.responses
    for name in ("store", "background"):
        if getattr(request, name) and store is None:
            raise ApiError(
                400, f"{name} is not supported: this server keeps no responses (store_responses)", param=name
            )
    if request.background and request.store is False:
        raise ApiError(400, "background needs store: true", param="background")
    if request.background and request.stream:
        raise ApiError(400, "background responses are not streamed here: ask for them by id", param="stream")
    return None if request.store is False else store


def _items(exchange: Exchange, request: ResponsesRequest) -> list[Item]:
    """The whole input: that of the responses before this one, what they said, and what is new."""
    store, owner = exchange.service.responses, owner_of(exchange)
    before: list[Item] = []
    if (name := request.previous_response_id) is not None:
        try:
            previous = store_of(exchange).get(name, owner)
        except ApiError as error:
            raise ApiError(
                400, error.message, param="previous_response_id", code="previous_response_not_found"
            ) from error
        if previous.task is not None:
            raise ApiError(400, f"response {name!r} is in progress", param="previous_response_id")
        before = [*previous.items, *previous.response["output"]]
    refers = any(one.kind == "item_reference" for one in request.input if not isinstance(one, str))
    new = input_items(request.input, {} if store is None or not refers else store.items(owner))
    return [*before, *new]


async def count(exchange: Exchange) -> None:
    """The tokens of an input."""
    request, service = await exchange.json(ResponsesRequest), exchange.service
    service.require_model(request.model)
    check(request)
    messages = conversation(_items(exchange, request), request.instructions)
    ids = await encoded(service, request, messages, options_of(service, request))
    await exchange.respond({"object": "response.input_tokens", "input_tokens": len(ids)})


ENDPOINTS = [
    Endpoint("POST", "/v1/responses", create),
    Endpoint("POST", "/v1/responses/input_tokens", count),
]
