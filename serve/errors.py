"""Errors of the API: what went wrong, in the shape that clients of each API expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import ErrorInfo, ReplicaError
from gristmill.runtime.scheduler import QueueFull, RequestTooLarge


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: the HTTP status.
        type: the kind of error, as OpenAI's API names it.
        param: the field of the request that is wrong.
        code: a short name for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})


RETRY_AFTER = 1
"""Seconds after which a request that found the queue full may be tried again."""


def api_error(error: BaseException) -> ApiError:
    """What a client is told about an exception of the engine or a handler."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLarge):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, QueueFull):
        return ApiError(
            429,
            str(error),
            type="rate_limit_error",
            code="queue_full",
            headers={"retry-after": str(RETRY_AFTER)},
        )
    if isinstance(error, EngineDraining):
        return unavailable("the server is draining: it takes no new requests")
    if isinstance(error, EngineDeadError | ReplicaError):
        return ApiError(
            503, f"the engine failed: {error}", type="server_error", code="engine_failed", headers=_LATER
        )
    if isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"invalid request: {error}", param=_place(str(error)))
    if isinstance(error, msgspec.DecodeError | RecursionError | UnicodeDecodeError):
        return ApiError(400, f"the body is not JSON: {error}", code="invalid_json")
    if isinstance(error, ValueError):  # UsageError and its kinds
        return ApiError(400, str(error))
    return ApiError(500, f"{type(error).__name__} in the server; its log has more", type="server_error")


_LATER = {"retry-after": "5"}


def unavailable(message: str, code: str = "unavailable") -> ApiError:
    """The server takes no requests now."""
    return ApiError(503, message, type="server_error", code=code, headers=_LATER)


def failed(info: ErrorInfo | None) -> ApiError:
    """A completion that ended with finish_reason ``error``."""
    if info is None:
        return ApiError(500, "the request failed", type="server_error")
    status = 400 if info.code in ("parameters_overflow", "no_token_allowed", "grammar_failed") else 500
    kind = "invalid_request_error" if status == 400 else "server_error"
    return ApiError(status, info.message, type=kind, code=info.code)


def _place(message: str) -> str | None:
    """The field that msgspec's message names: ``... - at `$.max_tokens```."""
    _, found, place = message.rpartition(" - at `$")
    return place.rstrip("`").lstrip(".") or None if found else None


@dataclass(frozen=True)
class Shape:
    """How an API writes what is not an answer.

    Attributes:
        body: an error and the request's id -> the body of the response.
        id_header: the header with the request's id.
        heartbeat: what a stream sends while it has nothing to say.
        error_event: what stands before an error in a stream.
    """

    body: Callable[[ApiError, str], Any]
    id_header: bytes = b"x-request-id"
    heartbeat: bytes = b": waiting\n\n"
    error_event: bytes = b""


def _openai(error: ApiError, request_id: str) -> Any:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


openai_shape = Shape(_openai)
"""As OpenAI's APIs."""

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _anthropic(error: ApiError, request_id: str) -> Any:
    kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


anthropic_shape = Shape(
    _anthropic, b"request-id", b'event: ping\ndata: {"type": "ping"}\n\n', b"event: error\n"
)
"""As Anthropic's API."""
