"""Whose stored responses a request may see."""

from __future__ import annotations

import hashlib

from gristmill.serve.errors import ApiError
from gristmill.serve.exchange import Exchange
from gristmill.serve.keys import key_of
from gristmill.serve.responses.store import ResponseStore


def owner_of(exchange: Exchange) -> str:
    """Who the client is: a digest of its key, where keys are asked for."""
    if exchange.service.keys is None:
        return ""
    headers = exchange.headers
    key = key_of(headers.get("authorization", ""), headers.get("x-api-key", ""))
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def store_of(exchange: Exchange) -> ResponseStore:
    """The responses that are kept. ApiError 404: none are."""
    store = exchange.service.responses
    if store is None:
        raise ApiError(404, "this server keeps no responses (store_responses)", code="response_not_found")
    return store
