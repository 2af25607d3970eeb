"""The ASGI application: routes, keys, errors, clients that leave."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.routing import Match, Route

from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError, Shape, anthropic_shape, api_error, openai_shape
from gristmill.serve.exchange import BODY_SECONDS, ClientGone, Exchange
from gristmill.serve.keys import KeyFile, key_of
from gristmill.serve.service import Service

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """A route.

    Attributes:
        method, path: as Starlette takes them.
        handler: answers an exchange.
        open: it needs no key.
        shape: how its errors are written.
        logged: each request is a line in the log.
    """

    method: str
    path: str
    handler: Handler
    open: bool = False
    shape: Shape = openai_shape
    logged: bool = True


_ID = re.compile(r"[\x21-\x7e]{1,128}")
HEARTBEAT_SECONDS = 15.0
"""A stream that had nothing to send for so long gets a sign of life, so that proxies do not close it."""


class Application:
    """Serves endpoints.

    Args:
        endpoints: the routes, those used most first.
        keys: who may use them; None = anybody.
        local: they are for programs of this machine, and for no page in a browser: `cors_origins` are not for them.
    """

    def __init__(
        self, service: Service, endpoints: Iterable[Endpoint], keys: KeyFile | None, *, local: bool = False
    ) -> None:
        self.service, self._keys, self._local = service, keys, local
        self._root = (service.config.root_path or "").rstrip("/")
        self._numbers = itertools.count()
        self._prefix = uuid.uuid4().hex[:12]
        endpoints = list(endpoints)
        self._exact = {(one.method, one.path): one for one in endpoints if "{" not in one.path}
        self._routes = [Route(one.path, _Asgi(self, one), methods=[one.method]) for one in endpoints]
        self._sweeper: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or the server's start and end."""
        if scope["type"] == "lifespan":
            with suppress(asyncio.CancelledError):  # a server that ends before it has served
                await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        elif scope["method"] == "OPTIONS":
            await self._preflight(scope, receive, send)
        else:
            path: str = scope["path"]
            if self._root and path.startswith(self._root + "/"):  # a proxy may strip it, or not
                scope["path"] = path = path[len(self._root) :]
            endpoint = self._exact.get((scope["method"], path))
            if endpoint is not None:
                await self.answer(endpoint, scope, receive, send)
                return
            matches = [(route, *route.matches(scope)) for route in self._routes]
            for route, match, child in matches:
                if match is Match.FULL:
                    scope.update(child)
                    await route.handle(scope, receive, send)
                    return
            partial = [route for route, match, _ in matches if match is Match.PARTIAL]
            refuse: Handler = _not_found
            anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
            shape = anthropic_shape if anthropic else openai_shape
            if partial:
                refuse = _wrong_method(sorted({m for route in partial for m in route.methods or ()}))
                shape = partial[0].app.endpoint.shape
            await self.answer(Endpoint("", "", refuse, shape=shape), scope, receive, send)

    async def answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by its endpoint; an exception becomes a response, or the end of a stream."""
        exchange = Exchange(self.service, scope, receive, send, "", endpoint.shape)
        given = exchange.headers.get("x-request-id", "")
        exchange.request_id = given if _ID.fullmatch(given) else f"{self._prefix}-{next(self._numbers)}"
        begin = time.monotonic()
        self.service.active.add(exchange)
        exchange.task = asyncio.current_task()
        try:
            refusal = self._of_page(exchange)
            if refusal is None and not endpoint.open:
                refusal = self._refusal(exchange)
            if refusal is not None:
                await self._fail(exchange, refusal)
            else:
                await self._handle(endpoint, exchange)
        except ClientGone:
            exchange.gone = True
        except asyncio.CancelledError:
            if exchange.late:
                exchange.give_up_body()
                late = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="timeout")
                await self._fail(exchange, late)
            elif not exchange.gone:
                raise
        finally:
            exchange.stop_watching()
            self.service.active.discard(exchange)
            if exchange.gone:
                exchange.record["client_gone"] = True
            if endpoint.logged:
                self._log(exchange, begin)

    async def _handle(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Answer, or say why not, in a span if requests are traced."""
        span: AbstractContextManager[object] = nullcontext()
        if endpoint.logged and self.service.tracer is not None:
            from gristmill.serve.tracing import route_span

            span = route_span(self.service.tracer, exchange)
        with span:
            try:
                await endpoint.handler(exchange)
            except ClientGone:
                exchange.gone = True
            except Exception as error:
                await self._fail(exchange, error)

    def _of_page(self, exchange: Exchange) -> ApiError | None:
        """Why a page in a browser may not call the server. Browsers ask for leave by a preflight only where a page wants to send JSON or read the
        answer: what it sends as plain text comes without, also to an address that is reached from this machine alone."""
        headers = exchange.headers
        origin = headers.get("origin")
        if self._local:
            if origin is not None:
                return _forbidden(
                    f"no page may call the admin plane, and this request is from one of {origin}"
                )
            if self._keys is None and not _is_loopback(host := headers.get("host", "")):
                # A page whose name was made to point here after it was loaded needs no leave to read what this name answers.
                return _forbidden(
                    f"without a key (--admin-key-file) the admin plane is reached as 127.0.0.1, localhost or [::1], not as {host!r}"
                )
            return None
        other = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if origin is None or not other or self.service.cors(origin) is not None:
            return None
        return _forbidden(
            f"pages of {origin} may not call this server: --cors-origins {origin} would let them"
        )

    def _refusal(self, exchange: Exchange) -> ApiError | None:
        """Why a client without a valid key may not use the API."""
        if self._keys is None:
            return None
        headers = exchange.headers
        key = key_of(headers.get("authorization", ""), headers.get("x-api-key", ""))
        if self._keys.allows(key):
            return None
        return ApiError(
            401,
            "a key is needed: Authorization: Bearer KEY" if not key else "the key is not known here",
            type="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        shown = api_error(error)
        exchange.record["error"] = shown.message
        if shown.status == 500:
            self.service.log.write(
                "error",
                request_id=exchange.request_id,
                error=f"{type(error).__name__}: {error}",
                where=_trace(error),
            )
        shape = exchange.shape
        body = encode(shape.body(shown, exchange.request_id))
        with suppress(OSError):
            if not exchange.status:
                await exchange.discard()
                await exchange.respond(body, shown.status, headers=shown.headers)
            elif exchange.on_error is not None:
                await exchange.end(exchange.on_error(shown))
            elif exchange.streaming:
                await exchange.end(shape.error_event + b"data: " + body + b"\n\n")

    def _log(self, exchange: Exchange, begin: float) -> None:
        scope = exchange.scope
        client = scope.get("client")
        self.service.log.write(
            "request",
            request_id=exchange.request_id,
            method=scope["method"],
            path=scope["path"],
            status=exchange.status or 499,
            seconds=round(time.monotonic() - begin, 6),
            client=None if client is None else client[0],
            **exchange.record,
        )

    async def _preflight(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A browser asks whether a page may call the API."""
        exchange = Exchange(self.service, scope, receive, send, self._prefix, openai_shape)
        await exchange.discard()
        if self._local or self.service.cors(exchange.headers.get("origin")) is None:
            await exchange.respond(b"", 403, content_type=b"text/plain")
            return
        # OpenAI's and Anthropic's packages send headers of their own, and other ones with each version.
        asked = exchange.headers.get("access-control-request-headers")
        await exchange.respond(
            b"",
            204,
            content_type=b"text/plain",
            headers={
                "access-control-allow-methods": "GET, POST, DELETE",
                "access-control-allow-headers": asked or "authorization, content-type, x-api-key",
                "access-control-max-age": "600",
            },
        )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._sweeper = asyncio.ensure_future(self._sweep())
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._sweeper is not None:
                    self._sweeper.cancel()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _sweep(self) -> None:
        """Once a second: end the requests of clients that do not read; send a sign of life into streams that wait."""
        limit = self.service.config.slow_reader_seconds
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for exchange in list(self.service.active):
                blocked = exchange.blocked
                if exchange.late and exchange.task is not None:
                    exchange.task.cancel()
                elif blocked is not None:
                    if now - blocked > limit and exchange.task is not None:
                        exchange.record["error"] = "the client did not read"
                        exchange.gone = True
                        exchange.task.cancel()
                elif exchange.streams and now - exchange.last_write > HEARTBEAT_SECONDS:
                    with suppress(OSError):
                        await exchange.start_events()
                        await exchange.write(exchange.shape.heartbeat)


class _Asgi:
    """An endpoint as an ASGI application: Starlette passes requests to instances without wrapping them."""

    def __init__(self, application: Application, endpoint: Endpoint) -> None:
        self._application, self.endpoint = application, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application.answer(self.endpoint, scope, receive, send)


async def _not_found(exchange: Exchange) -> None:
    raise ApiError(
        404,
        f"there is no {exchange.scope['method']} {exchange.scope['path']}; the routes are in GET /v1/models and docs/serve.md",
        code="not_found",
    )


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine, whatever a name server says."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name.lower() in ("", "localhost"):  # programs that speak HTTP/1.0 name none
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _wrong_method(allowed: list[str]) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        raise ApiError(
            405,
            f"{exchange.scope['path']} takes {', '.join(allowed)}, got {exchange.scope['method']}",
            code="method_not_allowed",
            headers={"allow": ", ".join(allowed)},
        )

    return refuse


def _trace(error: BaseException) -> list[str]:
    """Where an exception came from: file and line of its frames, without values."""
    frames: list[str] = []
    trace: Any = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename.rpartition('gristmill/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return frames[-12:]
