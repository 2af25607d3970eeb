"""A client of HTTP/1.1 that costs little per event: httptools parses, and a chunk goes from the socket's callback into its `Stream`, without a
task that wakes up for it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from gristmill.runtime.errors import UsageError
from gristmill.tools.bench_serve.events import Stream, StreamError, error_message


@dataclass(slots=True)
class Answer:
    """One request, and what came of it. Times are of `time.perf_counter`.

    Attributes:
        due: when it was to be sent; sent: when it was.
        ended: when its last byte came, or it failed.
        error: the kind of its failure, "" = none; message: what the server or the system said.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    stream: Stream = field(default_factory=Stream)
    status: int = 0
    error: str = ""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; of a server that does not count them, its chunks."""
        counted = self.stream.output_tokens
        return self.stream.chunks if counted is None else counted


class Connection(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = True
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._body: bytearray | None = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self.transport = cast(asyncio.Transport, transport)

    async def run(self, request: bytes, answer: Answer) -> None:
        """Send a request and wait until its answer has ended in one way or another."""
        assert self.transport is not None
        self._answer, self._body = answer, None
        self._waiter = asyncio.get_running_loop().create_future()
        answer.sent = time.perf_counter()
        self.transport.write(request)
        await self._waiter

    def data_received(self, data: bytes) -> None:
        """Of asyncio: every event of the data has the time at which it came."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, StreamError):
                self._fail(cause.kind, str(cause))
            else:
                self._fail("malformed response", str(error))

    def on_headers_complete(self) -> None:
        """Of httptools."""
        if self._answer is None:
            return
        self._answer.status = self._parser.get_status_code()
        if self._answer.status != 200:
            self._body = bytearray()

    def on_body(self, data: bytes) -> None:
        """Of httptools."""
        if self._answer is None:
            return
        if self._body is None:
            self._answer.stream.feed(data, self._now)
        elif len(self._body) < 1 << 16:
            self._body += data

    def on_message_complete(self) -> None:
        """Of httptools."""
        if self._answer is None or 100 <= self._answer.status < 200:
            return
        self.reusable = self.reusable and bool(self._parser.should_keep_alive())
        if self._body is not None:
            self._answer.error = f"HTTP {self._answer.status}"
            self._answer.message = error_message(bytes(self._body))
        elif not (self._answer.stream.finished or self._answer.stream.done):
            self._answer.error, self._answer.message = "no finish", "the stream ended without a finish_reason"
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self.reusable = False
        if self._answer is None:
            return
        self._now = time.perf_counter()
        if self._answer.stream.done:
            self._end()  # an answer without a length ends with its connection
        else:
            self._fail("connection lost", str(exc or "the server closed it before the answer was complete"))

    def abandon(self, kind: str, message: str) -> None:
        """Give the request up."""
        self._now = time.perf_counter()
        self._fail(kind, message)

    def close(self) -> None:
        """Close the connection; nobody waits for it."""
        self._answer = None
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, kind: str, message: str) -> None:
        self.reusable = False
        if self._answer is not None:
            self._answer.error, self._answer.message = kind, message
            self._end()
        if self.transport is not None:
            self.transport.abort()

    def _end(self) -> None:
        assert self._answer is not None and self._waiter is not None
        self._answer.ended, self._answer = self._now, None
        if not self._waiter.done():
            self._waiter.set_result(None)


class Client:
    """A server, and the connections to it that are open. There are as many as requests at a time.

    Args:
        base_url: ``http[s]://HOST[:PORT][/PATH]``; ``/v1`` is added where it is missing.
        headers: sent with every request.
        timeout: seconds of a request.
        insecure: take any certificate.

    Raises:
        UsageError: not such an address.
    """

    def __init__(
        self, base_url: str, headers: Mapping[str, str], timeout: float = 600.0, insecure: bool = False
    ) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise UsageError(f"--base-url must be http[s]://HOST[:PORT][/PATH], got {base_url!r}")
        self.timeout = timeout
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        path = parts.path.rstrip("/")
        self.path = path if path.endswith("/v1") else f"{path}/v1"
        host = f"[{self._host}]" if ":" in self._host else self._host
        given = {"Host": f"{host}:{self._port}", "User-Agent": "gristmill-bench", **headers}
        for name, value in given.items():
            if any(sign in name + value for sign in "\r\n"):
                raise UsageError(f"header {name} has a line break in it")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._idle: list[Connection] = []

    def request(self, route: str, body: bytes | None = None) -> bytes:
        """The bytes of a request: POST of a body, else GET."""
        method = "GET" if body is None else "POST"
        kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self.path}{route} HTTP/1.1\r\n{self._headers}{kind}\r\n"
        return head.encode() + (body or b"")

    async def send(self, request: bytes, answer: Answer) -> None:
        """Send a request, and fill its answer; what fails is in it."""
        loop = asyncio.get_running_loop()
        while True:
            connection = self._open_one()
            used = connection is not None
            try:
                if connection is None:
                    connection = await self._connect()
            except (OSError, ssl.SSLError) as error:
                now = time.perf_counter()
                answer.sent, answer.ended = answer.sent or now, now
                answer.error, answer.message = (
                    "connection refused" if isinstance(error, ConnectionRefusedError) else "no connection",
                    str(error),
                )
                return
            timer = loop.call_later(
                self.timeout, connection.abandon, "timeout", f"not complete after {self.timeout:g} s"
            )
            try:
                await connection.run(request, answer)
            except asyncio.CancelledError:
                connection.close()
                raise
            finally:
                timer.cancel()
            if connection.reusable:
                self._idle.append(connection)
            elif used and answer.error == "connection lost" and not answer.status:
                answer.error = answer.message = ""  # closed by the server while it was idle
                continue
            return

    def _open_one(self) -> Connection | None:
        """An idle connection that the server has not closed."""
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        _, connection = await asyncio.wait_for(
            asyncio.get_running_loop().create_connection(
                Connection, self._host, self._port, ssl=self._tls, server_hostname=None
            ),
            self.timeout,
        )
        return connection

    async def get(self, route: str) -> bytes:
        """The body of a GET.

        Raises:
            UsageError: no answer, or not 200.
        """
        collected = _Collected()
        answer = Answer(time.perf_counter(), stream=collected)
        await self.send(self.request(route), answer)
        if answer.error:
            raise UsageError(f"{route} of {self._host}:{self._port}: {answer.error}: {answer.message}")
        return bytes(collected.data)

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()


class _Collected(Stream):
    """A body that is no stream."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        super().__init__()
        self.data, self.finished = bytearray(), True

    def feed(self, data: bytes, now: float) -> None:
        """Keep the bytes."""
        self.data += data
