"""The page: chat on the model, what the server has to do, which kernels run and why. It loads nothing from elsewhere."""

from __future__ import annotations

import time
from functools import cache
from importlib import resources
from typing import Any

from gristmill.runtime.explain import summarize
from gristmill.serve.app import Endpoint, Handler
from gristmill.serve.exchange import Exchange
from gristmill.serve.service import Service

SAFE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
COUNTED = {
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "time_to_first_token_seconds_sum": "first_token_seconds",
    "time_to_first_token_seconds_count": "first_token_count",
}
"""Samples of the metrics -> their names in the state."""


@cache
def _file(name: str) -> bytes:
    return resources.files("gristmill.serve").joinpath("ui", name).read_bytes()


def shown(name: str, content_type: bytes) -> Handler:
    """A file of the page."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(_file(name), content_type=content_type, headers=SAFE)

    return handler


def state_of(service: Service) -> str:
    """In a word, what the server does."""
    if service.draining:
        return "draining"
    if service.config.render_only:
        return "rendering only"
    if service.failed:
        return f"failed: {service.problem}"
    if service.restarting:
        return "starting the engine again"
    return "ready" if service.engine is not None else service.problem


async def state(exchange: Exchange) -> None:
    """What the page draws, once a second."""
    service = exchange.service
    await exchange.respond(
        {
            "model": service.name,
            "state": state_of(service),
            "pools": service.pools,
            "loading": service.progress,
            "time": time.monotonic(),
            "uptime": time.time() - service.created,
            "active": len(service.active),
            "engines": await service.engine_states(),
            **totals(service),
        }
    )


def totals(service: Service) -> dict[str, float]:
    """Counts since the start, from the metrics."""
    found = dict.fromkeys(COUNTED.values(), 0.0)
    for family in () if service.registry is None else service.registry.collect():
        for sample in family.samples:
            name = COUNTED.get(sample.name.partition(":")[2])
            if name is not None:
                found[name] += sample.value
    return found


async def kernels(exchange: Exchange) -> None:
    """Which kernel each operation ran, and why."""
    engine = exchange.service.engine
    rows: list[Any] = []
    if engine is not None:
        for one in await engine.explain():
            if not isinstance(one, BaseException):
                rows += one
    await exchange.respond({"kernels": summarize(rows)})


ENDPOINTS = [
    Endpoint("GET", "/ui", shown("page.html", b"text/html; charset=utf-8"), open=True, logged=False),
    Endpoint("GET", "/ui/page.css", shown("page.css", b"text/css; charset=utf-8"), open=True, logged=False),
    Endpoint(
        "GET", "/ui/page.js", shown("page.js", b"text/javascript; charset=utf-8"), open=True, logged=False
    ),
    Endpoint("GET", "/ui/state", state, logged=False),
    Endpoint("GET", "/ui/kernels", kernels, logged=False),
]
