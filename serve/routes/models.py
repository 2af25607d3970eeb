"""GET /v1/models, with the fields of OpenAI's and of Anthropic's API."""

from __future__ import annotations

from datetime import UTC, datetime
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
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": service.max_model_len,
        "max_tokens": service.max_model_len,
    }


async def models(exchange: Exchange) -> None:
    """All names of the model."""
    service = exchange.service
    await exchange.respond(
        {
            "object": "list",
            "data": [_entry(service, name) for name in service.names],
            "has_more": False,
            "first_id": service.names[0],
            "last_id": service.names[-1],
        }
    )


async def model(exchange: Exchange) -> None:
    """One of them."""
    service = exchange.service
    await exchange.respond(_entry(service, service.require_model(exchange.path_params["name"])))


ENDPOINTS = [
    Endpoint("GET", "/v1/models", models, logged=False),
    Endpoint("GET", "/v1/models/{name:path}", model, logged=False),
]
