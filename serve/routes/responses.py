"""/v1/responses, as OpenAI's API."""

from __future__ import annotations

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import continued
from gristmill.serve.logprobs import chat_logprobs
from gristmill.serve.responses import background
from gristmill.serve.responses.events import ResponseEvents, usage, written
from gristmill.serve.responses.items import Item, conversation, input_items
from gristmill.serve.responses.owner import owner_of, store_of
from gristmill.serve.responses.request import (
    ResponsesRequest,
    check,
    encoded,
    head,
    options_of,
    sampling,
)
from gristmill.serve.responses.store import ResponseStore, Stored
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
    ids = await encoded(exchange, request, messages, options)
    params = sampling(service, request, len(ids))
    generation = continued(
        exchange, options, ids, params, priority=request.priority, interval_ms=request.stream_interval_ms
    )
    events = ResponseEvents(
        head(request, model, params),
        lambda: usage(generation),
        (lambda chunk: chat_logprobs(service, [chunk])["content"]) if request.wants_logprobs else None,
    )
    stored = Stored(owner_of(exchange), events.response, items, background=bool(request.background))
    if request.background and store is not None:
        stored.events = [] if request.stream else None
        background.begin(exchange, store, stored, generation, events)
        if request.stream:
            await background.follow(exchange, stored, 0)
        else:
            await exchange.respond(events.response)
        return
    exchange.watch()
    if request.stream:
        exchange.streams = True
        exchange.on_error = lambda error: b"".join(written(events.failed(error)))
    some = events.start()
    async for part in generation.parts():
        some += events.of(part)
        if part.finish is not None:
            exchange.record["finish"] = [part.finish]
            if store is not None:  # before the client knows: it may go on from it at once
                store.put(stored)
        if request.stream and some:
            await exchange.start_events()
            await exchange.write(b"".join(written(some)))
        some = []
    if request.stream:
        await exchange.end()
    else:
        await exchange.respond(events.response)


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
    ids = await encoded(exchange, request, messages, options_of(service, request))
    await exchange.respond({"object": "response.input_tokens", "input_tokens": len(ids)})


ENDPOINTS = [
    Endpoint("POST", "/v1/responses", create),
    Endpoint("POST", "/v1/responses/input_tokens", count),
]
