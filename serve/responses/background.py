"""Responses that are generated whether a client waits for them or not."""

from __future__ import annotations

import asyncio
from typing import Any

from gristmill.serve.errors import RETRY_AFTER, ApiError, api_error
from gristmill.serve.exchange import Exchange
from gristmill.serve.generation import Generation
from gristmill.serve.responses.events import ResponseEvents, written
from gristmill.serve.responses.store import ResponseStore, Stored


def begin(
    exchange: Exchange, store: ResponseStore, stored: Stored, generation: Generation, events: ResponseEvents
) -> None:
    """Begin to generate. ApiError 429: the store has no room."""
    service = exchange.service
    # The server waits for what is active when it drains, and ends it when its time is over.
    job = Exchange(service, exchange.scope, _nowhere, _nowhere, exchange.request_id, exchange.shape)
    stored.add(written(events.start()))
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


async def _work(
    job: Exchange, store: ResponseStore, stored: Stored, generation: Generation, events: ResponseEvents
) -> None:
    error: str | None = None
    try:
        async for part in generation.parts():
            stored.add(written(events.of(part)))
    except asyncio.CancelledError:
        events.cancelled()
    except Exception as failure:
        stored.add(written(events.failed(api_error(failure))))
        error = f"{type(failure).__name__}: {failure}"
    finally:
        job.service.active.discard(job)
        stored.task = None
        stored.add([])
        if store.holds(stored):
            store.put(stored)
        status = events.response["status"]
        job.service.log.write("response", request_id=job.request_id, status=status, error=error)


async def _nowhere(message: Any = None) -> Any:
    raise RuntimeError("a response in the background has no client")


async def follow(exchange: Exchange, stored: Stored, first: int) -> None:
    """A stream of its events from this number on, until it ends; who leaves does not end it. ApiError: its events are not kept."""
    if stored.events is None:
        raise ApiError(
            400,
            "only responses made with background: true and stream: true are streamed by their id",
            param="stream",
        )
    exchange.streams = True
    exchange.watch()
    await exchange.start_events()
    while True:
        changed = stored.changed
        if some := stored.events[first:]:
            first += len(some)
            await exchange.write(b"".join(some))
        elif stored.task is None:
            break
        else:
            await changed.wait()
    await exchange.end()
