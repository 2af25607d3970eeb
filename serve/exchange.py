"""One request and its response, on the ASGI interface: the body within its limits, JSON out, server-sent events."""

from __future__ import annotations

import asyncio
import gc
import time
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError, Shape

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from gristmill.serve.service import Service

T = TypeVar("T")

MAX_DEPTH = 128
"""Nested arrays and objects in a body. More are no request, and cost a recursion each."""
MAX_PARTS = 1 << 17
"""Arrays, objects, and entries of objects in a body. The interpreter does nothing else while it makes their values: a tenth of a second for these."""
LONG_NUMBER, MAX_LONG_NUMBERS = 20, 1 << 10
"""Digits that no number needs, and how many such numbers a body may have: to round one takes a hundred times as long as others."""
LARGE_BODY = 1 << 16
"""Bytes of a body that is read in a thread, beside the streams of others."""
BODY_SECONDS = 60.0
"""How long a client may take to send a body."""
DISCARD_BYTES, DISCARD_SECONDS = 64 << 20, 5.0
"""How much of a body is read, and for how long, that nobody wants."""
JSON = b"application/json"
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Exchange:
    """A request that is being answered.

    Attributes:
        service: what the server serves.
        request_id: the client's X-Request-Id, or one of ours.
        shape: how errors are written, by the API of the route.
        status: of the response, once it has begun; 0 before.
        record: what the log line and the span of this request say, by name.
        blocked: since when a client does not read, by time.monotonic; None = it does.
        reading: since when the body is waited for; None = it is not, or is there.
        size: bytes of the body, once it is read.
        last_write: when something was sent.
        streams: the answer is a stream of events, which has begun or waits for its first part.
        task: the handler's.
        on_error: writes an error into a stream that has begun; None = as the shape has it.
        gone: the client has closed the connection, or was given up.
    """

    __slots__ = (
        "_headers",
        "_receive",
        "_send",
        "_watcher",
        "_whole",
        "blocked",
        "gone",
        "last_write",
        "on_error",
        "reading",
        "record",
        "request_id",
        "scope",
        "service",
        "shape",
        "size",
        "status",
        "streaming",
        "streams",
        "task",
    )

    def __init__(
        self, service: Service, scope: Scope, receive: Receive, send: Send, request_id: str, shape: Shape
    ) -> None:
        self.service, self.scope, self._receive, self._send = service, scope, receive, send
        self.request_id, self.shape = request_id, shape
        self.status = self.size = 0
        self.streaming = self.streams = False
        self.record: dict[str, Any] = {}
        self.blocked: float | None = None
        self.reading: float | None = None
        self.last_write = time.monotonic()
        self.task: asyncio.Task[Any] | None = None
        self.gone = False
        self.on_error: Callable[[ApiError], bytes] | None = None
        self._whole = False
        self._watcher: asyncio.Task[None] | None = None
        self._headers: dict[str, str] | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the request, by lower-case name; of several the last."""
        if self._headers is None:
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in self.scope["headers"]
            }
        return self._headers

    @property
    def late(self) -> bool:
        """Whether the body has not come within its time."""
        return self.reading is not None and time.monotonic() - self.reading > BODY_SECONDS

    @property
    def path_params(self) -> MutableMapping[str, Any]:
        """The variable parts of the path."""
        params: MutableMapping[str, Any] = self.scope.get("path_params", {})
        return params

    async def body(self) -> bytes:
        """The body, decompressed. ApiError: it is too large, or in an encoding that the server does not take."""
        limit = self.service.config.max_body_bytes
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        self.reading = time.monotonic()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._whole = not message.get("more_body")
            if size > limit:
                raise _too_large(limit)
            if self._whole:
                self.reading = None
                break
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if encoding not in ("", "identity"):
            body = await asyncio.to_thread(_decompress, body, encoding, limit)
        self.size = len(body)
        return body

    def give_up_body(self) -> None:
        """The body is waited for no more."""
        self.reading, self._whole = None, True

    async def discard(self) -> None:
        """Read what is left of the body, within limits: a client that is still sending would not see the response."""
        if self._whole or "expect" in self.headers:
            return
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while size < DISCARD_BYTES:
                    message = await self._receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return

    async def json(self, declared: type[T]) -> T:
        """The body as a value of a declared type. ApiError names the field that is wrong."""
        body = await self.body()
        if not body:
            raise ApiError(400, "the request has no body: a JSON object is expected", code="invalid_json")
        if len(body) < LARGE_BODY:
            return _decoded(body, declared)
        return await asyncio.to_thread(_decoded, body, declared)

    def watch(self) -> None:
        """From now on the handler is cancelled when the client closes the connection; for after `body`."""
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._left())
            self._watcher.add_done_callback(self._cancel)

    def stop_watching(self) -> None:
        """The handler has ended."""
        if self._watcher is not None:
            self._watcher.remove_done_callback(self._cancel)
            self._watcher.cancel()

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _cancel(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and self.task is not None:
            self.gone = True
            self.task.cancel()

    async def respond(
        self,
        value: Any,
        status: int = 200,
        *,
        content_type: bytes = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """The whole response: bytes, or a value that is written as JSON."""
        body = value if isinstance(value, bytes) else encode(value)
        await self._start(status, content_type, [(b"content-length", b"%d" % len(body))], headers)
        await self._write({"type": "http.response.body", "body": body})

    async def start_events(self) -> None:
        """Begin a stream of server-sent events, if it has not begun."""
        if self.status:
            return
        self.streaming = self.streams = True
        await self._start(
            200,
            b"text/event-stream; charset=utf-8",
            [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
            None,
        )

    async def write(self, data: bytes) -> None:
        """More of the stream. Waits while the client reads too slowly."""
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The end of the stream."""
        await self._write({"type": "http.response.body", "body": data})

    async def _write(self, message: MutableMapping[str, Any]) -> None:
        self.last_write = self.blocked = time.monotonic()
        await self._send(message)
        self.blocked = None

    async def _start(
        self,
        status: int,
        content_type: bytes,
        more: list[tuple[bytes, bytes]],
        headers: Mapping[str, str] | None,
    ) -> None:
        self.status = status
        sent = [
            (b"content-type", content_type),
            (self.shape.id_header, self.request_id.encode("latin-1")),
            *more,
        ]
        for name, value in (headers or {}).items():
            sent.append((name.encode("latin-1"), value.encode("latin-1")))
        if (cors := self.service.cors(self.headers.get("origin"))) is not None:
            sent += cors
        await self._send({"type": "http.response.start", "status": status, "headers": sent})


class ClientGone(Exception):
    """The client closed the connection."""


def to_plain(value: Any) -> Any:
    """A result of the engine as JSON has it: dataclasses as objects, exceptions as texts."""
    if isinstance(value, BaseException):
        return {"error": f"{type(value).__name__}: {value}"}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return value


def _decoded(body: bytes, declared: type[T]) -> T:
    """The value of a JSON text. ApiError: it is too deep, or has too many parts; msgspec's errors: it is no JSON, or of another type."""
    check_parts(body)
    decoder = _decoders.get(declared)
    if decoder is None:
        decoder = _decoders[declared] = msgspec.json.Decoder(declared)
    # JSON has no cycles to look for, which takes ten times as long as to read a body of many lists.
    collects = gc.isenabled()
    gc.disable()
    try:
        value: T = decoder.decode(body)
    finally:
        if collects:
            gc.enable()
    return value


_STEPS = bytes(1 if code in b"[{" else 255 if code in b"]}" else 0 for code in range(256))
"""What bytes add to the depth, as signed bytes."""
_DIGITS = bytes(48 if code in b"0123456789." else 32 for code in range(256))
"""Digits as 0, others as blanks."""


def check_parts(body: bytes) -> None:
    """ApiError if the JSON text is nested too deeply, before any recursive parser reads it, or has more parts, or numbers with more digits, than a
    request needs. What is inside texts does not count."""
    opened, parts, long = _counts(body)
    if opened <= MAX_DEPTH and parts <= MAX_PARTS and long <= MAX_LONG_NUMBERS:
        return
    import numpy as np

    # Of a body of millions of brackets, arrays take a fraction of a second, and most of it beside other threads.
    codes = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    # Odd in a text, also after 256 quotes.
    outside = codes[np.cumsum(codes == ord('"'), dtype=np.uint8) & 1 == 0].tobytes()
    steps = np.frombuffer(outside.translate(_STEPS), np.int8)
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ApiError(400, f"the JSON is nested more than {MAX_DEPTH} levels deep")
    _, parts, long = _counts(outside)
    if parts > MAX_PARTS:
        raise ApiError(
            400,
            f"the JSON has {parts} arrays, objects and entries of objects, at most {MAX_PARTS} are taken: send several requests",
        )
    if long > MAX_LONG_NUMBERS:
        raise ApiError(
            400,
            f"the JSON has {long} numbers of {LONG_NUMBER} digits or more, at most {MAX_LONG_NUMBERS} are taken: 17 digits say all of a float",
        )


def _counts(text: bytes) -> tuple[int, int, int]:
    """(arrays and objects, these and entries of objects, long numbers)."""
    opened = text.count(b"[") + text.count(b"{")
    return opened, opened + text.count(b":"), text.translate(_DIGITS).count(b"0" * LONG_NUMBER)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes (max_body_bytes)",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(
            415, f"content-encoding must be gzip, deflate or identity, got {encoding!r}", code="encoding"
        )
    stream = zlib.decompressobj(47 if "gzip" in encoding else 15)
    try:
        text = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not {encoding}: {error}", code="encoding") from error
    if len(text) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise ApiError(400, f"the body is {encoding} that was cut off", code="encoding")
    return text
