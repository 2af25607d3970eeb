"""GET /v1/models, as OpenAI's API."""

from __future__ import annotations

from typing import Any

from gristmill.serve.app import Endpoint
from gristmill.serve.exchange import Exchange
from gristmill.serve.service import Service


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "gristmill",
        "root": service.name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


async def models(exchange: Exchange) -> None:
    """All names of the model."""
    service = exchange.service
    await exchange.respond({"object": "list", "data": [_entry(service, name) for name in service.names]})


async def model(exchange: Exchange) -> None:
    """One of them."""
    service = exchange.service
    await exchange.respond(_entry(service, service.require_model(exchange.path_params["name"])))


ENDPOINTS = [
    Endpoint("GET", "/v1/models", models, logged=False),
    Endpoint("GET", "/v1/models/{name:path}", model, logged=False),
]
