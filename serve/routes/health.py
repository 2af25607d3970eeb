"""What load balancers, orchestrators and dashboards ask for."""

from __future__ import annotations

from gristmill import __version__
from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError, openai_shape, unavailable
from gristmill.serve.exchange import Exchange


async def health(exchange: Exchange) -> None:
    """200 while the process can answer: also while the model loads, or the server drains. 503: its engine has failed for good."""
    service = exchange.service
    if service.failed:
        raise unavailable(service.problem, "engine_failed")
    await exchange.respond({"status": "ok"})


async def ready(exchange: Exchange) -> None:
    """200 while requests are served; 503 while the server drains, no engine is alive, or the model loads: then it says how far that is."""
    service = exchange.service
    if not service.config.render_only:
        try:
            service.require_ready()
        except ApiError as error:
            loading = service.progress
            if loading is None or service.draining:
                raise
            body = {"status": "loading", "model": service.name, **loading, **openai_shape.body(error, "")}
            await exchange.respond(body, error.status, headers=error.headers)
            return
    elif service.draining:
        raise unavailable("the server is draining", "draining")
    await exchange.respond({"status": "ready", "model": service.name})


async def version(exchange: Exchange) -> None:
    """The version of gristmill."""
    await exchange.respond({"version": __version__})


async def metrics(exchange: Exchange) -> None:
    """Prometheus' text format."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    registry = exchange.service.registry
    text = b"" if registry is None else generate_latest(registry)
    await exchange.respond(text, content_type=CONTENT_TYPE_LATEST.encode())


async def capacity(exchange: Exchange) -> None:
    """For each engine what it can take and what it has to do."""
    service = exchange.service
    await exchange.respond(
        {
            "model": service.name,
            "max_model_len": service.max_model_len,
            "active_requests": len(service.active),
            "draining": service.draining,
            "engines": await service.engine_states(),
        }
    )


ENDPOINTS = [
    Endpoint("GET", "/health", health, open=True, logged=False),
    Endpoint("GET", "/ping", health, open=True, logged=False),
    Endpoint("GET", "/ready", ready, open=True, logged=False),
    Endpoint("GET", "/version", version, open=True, logged=False),
    Endpoint("GET", "/metrics", metrics, open=True, logged=False),
    Endpoint("GET", "/capacity", capacity, logged=False),
]
