"""The admin plane: what operators do, on a port of its own that is bound to the loopback address."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gristmill.serve.app import Endpoint
from gristmill.serve.errors import ApiError, api_error
from gristmill.serve.exchange import Exchange, to_plain
from gristmill.serve.routes import health
from gristmill.serve.service import Engine


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """POST /pause: `mode` as in `Engine.pause`."""

    mode: Literal["abort", "wait", "keep"] = "wait"


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A body without fields."""


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """POST /drain: the whole server, which then ends."""

    seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    """POST /sleep: `level` as in `Engine.sleep`."""

    level: Literal[1, 2] = 1


class Wake(msgspec.Struct, forbid_unknown_fields=True):
    """POST /wake_up: `parts` as in `Engine.wake_up`; None = all."""

    parts: list[Literal["weights", "kv_cache"]] | None = None


class Weights(msgspec.Struct, forbid_unknown_fields=True):
    """POST /update_weights: a directory on the server's disk."""

    path: str


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """POST /set_log_level."""

    level: Literal["debug", "info", "warning", "error"]


class Profile(msgspec.Struct, forbid_unknown_fields=True):
    """POST /profile: the next steps of each engine, as a trace for chrome://tracing."""

    steps: Annotated[int, msgspec.Meta(ge=1)]
    path: str


def _engine(exchange: Exchange) -> Engine:
    """The engine, also while the server drains. ApiError 503: there is none."""
    engine = exchange.service.engine
    if engine is None:
        raise ApiError(503, exchange.service.problem, type="server_error", code="loading")
    return engine


def action(path: str, declared: type[Any]) -> Endpoint:
    """POST /PATH calls the method of this name of the engine, with the fields that are given."""

    async def handler(exchange: Exchange) -> None:
        body = await exchange.body()
        given = msgspec.json.decode(body or b"{}", type=declared)
        engine = _engine(exchange)
        values = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
        result = await getattr(engine, path)(**values)
        require_done(path, result)
        await exchange.respond({"ok": True, "result": to_plain(result)})

    return Endpoint("POST", f"/{path}", handler)


def require_done(path: str, results: Any) -> None:
    """ApiError: an engine raised something instead of doing it. It names those that did not; others have done it."""
    answers = results if isinstance(results, list) else [results]
    failures = {number: one for number, one in enumerate(answers) if isinstance(one, BaseException)}
    if not failures:
        return
    # A path that cannot be read or written is the operator's mistake, too.
    told = [ApiError(400, "") if isinstance(one, OSError) else api_error(one) for one in failures.values()]
    status = max(one.status for one in told)
    causes = "; ".join(f"engine {number}: {type(one).__name__}: {one}" for number, one in failures.items())
    done = len(answers) - len(failures)
    raise ApiError(
        status,
        f"{path} failed in {len(failures)} of {len(answers)} engines{', and is done in the others' if done else ''}: {causes}",
        type="invalid_request_error" if status == 400 else "server_error",
        code="action_failed",
    )


async def drain(exchange: Exchange) -> None:
    """Drain the server: it refuses new requests, lets others finish within its limit, and ends."""
    given = msgspec.json.decode(await exchange.body() or b"{}", type=Drain)
    exchange.service.on_drain(given.seconds)
    await exchange.respond({"ok": True, "unfinished": len(exchange.service.active) - 1})


def shown(path: str) -> Endpoint:
    """GET /PATH shows what the method of this name of the engine returns."""

    async def handler(exchange: Exchange) -> None:
        engine = _engine(exchange)
        result = await getattr(engine, path)()
        await exchange.respond({"ok": True, "result": to_plain(result)})

    return Endpoint("GET", f"/{path}", handler, logged=False)


ENDPOINTS = [
    action("pause", Pause),
    action("resume", Nothing),
    Endpoint("POST", "/drain", drain),
    action("sleep", Sleep),
    action("wake_up", Wake),
    action("update_weights", Weights),
    action("reset_prefix_cache", Nothing),
    action("set_log_level", LogLevel),
    action("profile", Profile),
    shown("status"),
    shown("dump"),
    shown("explain"),
    *health.ENDPOINTS,
]
