"""uvicorn's HTTP/1 over httptools, with a limit on what a client sends beside bodies: neither of them has one, and the time that a long head takes
grows with its square."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gristmill.serve.encoding import encode
from gristmill.serve.errors import ApiError, openai_shape

MAX_HEAD = 64 << 10
"""Bytes of a request's line and headers, of the extensions of a chunk, or of the trailers of a body. What comes with its last bytes in one read of
the socket, a quarter of a megabyte at most, is taken nevertheless."""


class BoundedHttp(HttpToolsProtocol):
    """A connection that ends when a client has sent MAX_HEAD bytes in which no head, part of a body or request is complete."""

    _pending = 0

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        self._pending += len(data)
        super().data_received(data)
        if self._pending > MAX_HEAD and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """The request begins."""
        self._pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._pending = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        """Say why, unless a response is on its way, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            error = ApiError(
                431,
                f"the request's line and headers are larger than {MAX_HEAD} bytes: send what is long in the body",
                code="headers_too_large",
            )
            body = encode(openai_shape.body(error, ""))
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()
