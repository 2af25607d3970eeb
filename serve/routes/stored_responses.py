"""/v1/responses/ID, as OpenAI's API: responses that are kept."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.responses.background import follow
from gristmill.serve.responses.owner import owner_of, store_of
from gristmill.serve.responses.store import Stored

MAX_PAGE = 100


def _kept(exchange: Exchange) -> Stored:
    return store_of(exchange).get(exchange.path_params["name"], owner_of(exchange))


async def retrieve(exchange: Exchange) -> None:
    """A response that is kept, as far as it is; or its events, those that come included."""
    stored, query = _kept(exchange), _query(exchange)
    if query.get("stream", "false").lower() in ("false", "0"):
        await exchange.respond(stored.response)
        return
    after = query.get("starting_after")
    if after is not None and not (after.isdecimal() and len(after) < 10):
        raise ApiError(
            400, f"starting_after must be the number of an event, got {after!r}", param="starting_after"
        )
    await follow(exchange, stored, 0 if after is None else int(after) + 1)


async def delete(exchange: Exchange) -> None:
    """Forget a response."""
    name = exchange.path_params["name"]
    store_of(exchange).delete(name, owner_of(exchange))
    await exchange.respond({"id": name, "object": "response", "deleted": True})


async def cancel(exchange: Exchange) -> None:
    """End a response in the background. One that has ended stays as it is."""
    stored = _kept(exchange)
    if not stored.background:
        raise ApiError(400, "only responses in the background can be cancelled")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])
    await exchange.respond(stored.response)


async def items(exchange: Exchange) -> None:
    """The input of a response, a page at a time."""
    found, query = list(_kept(exchange).items), _query(exchange)
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order!r}", param="order")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_PAGE:
        raise ApiError(400, f"limit must be 1 to {MAX_PAGE}, got {limit!r}", param="limit")
    if order == "desc":
        found.reverse()
    if (after := query.get("after")) is not None:
        place = next((number for number, one in enumerate(found) if one["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after: there is no item {after!r}", param="after")
        found = found[place + 1 :]
    page = found[: int(limit)]
    await exchange.respond(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(page) < len(found),
        }
    )


def _query(exchange: Exchange) -> dict[str, str]:
    """The parameters after the path; of several the last."""
    text = exchange.scope["query_string"].decode("latin-1")
    try:
        return {name: values[-1] for name, values in parse_qs(text, max_num_fields=32).items()}
    except ValueError as error:
        raise ApiError(400, f"the query cannot be read: {error}") from error


ENDPOINTS = [
    Endpoint("GET", "/v1/responses/{name}", retrieve),
    Endpoint("DELETE", "/v1/responses/{name}", delete),
    Endpoint("POST", "/v1/responses/{name}/cancel", cancel),
    Endpoint("GET", "/v1/responses/{name}/input_items", items),
]
