"""The life of a server: it listens, loads its model, answers, drains, ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.runtime.chat.chat import Chat
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.pooling.open import describe_pooling
from gristmill.runtime.sampling_params import recommended_sampling
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.serve.config import ServeConfig
from gristmill.serve.request_log import RequestLog
from gristmill.serve.service import Service

if TYPE_CHECKING:
    import uvicorn

    from gristmill.serve.app import Application

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def make_service(
    model: str | Path, config: ServeConfig, engine: EngineConfig, shown: str | None = None
) -> Service:
    """What a server serves, without the engine: configuration, tokenizer, conversations. `shown`: the model's name, if it is not what it is
    found by.

    Raises:
        UsageError: no such model, no tokenizer, a template or a format that there is not.
    """
    checkpoint = open_checkpoint(model)
    pooling = describe_pooling(checkpoint, engine)
    if pooling is not None:
        checkpoint = pooling.checkpoint
    data, generation, origin = checkpoint.config()
    parsed = parse_config(data, generation, origin).for_length(engine.max_model_len)
    tokenizer = Tokenizer(checkpoint)
    chat = Chat(checkpoint, tokenizer, template=config.chat_template, output_format=config.chat_format)
    limit = min(engine.max_model_len or parsed.max_position, parsed.max_position)
    if pooling is not None:
        limit = pooling.front.shape.max_length
    defaults = recommended_sampling(generation) if config.generation_config == "model" else {}
    tracer = None
    if config.otlp_endpoint is not None:
        from gristmill.serve.tracing import otlp_tracer

        tracer = otlp_tracer(config.otlp_endpoint)
    return Service(
        config,
        tuple(config.served_model_name) or (shown or str(model),),
        tokenizer,
        chat,
        limit,
        parsed.vocab_size,
        defaults,
        RequestLog(config.log_file),
        tracer=tracer,
        pools=pooling is not None,
    )


class Server:
    """A server in the event loop of the main thread.

    Args:
        load: makes the engine, in a thread; None = the server renders only. Its result has `close()`.

    Attributes:
        service: what it serves.
    """

    def __init__(self, service: Service, load: Callable[[Service], Any] | None) -> None:
        self.service, self._load = service, load
        self._ending: asyncio.Task[None] | None = None
        self._servers: list[uvicorn.Server] = []

    async def run(
        self,
        ready: Callable[[str], None] = lambda url: None,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        """Serve until one of the signals, `stop`, or a model that cannot be loaded. `ready` gets the address as soon as it listens.

        Raises:
            UsageError: the address cannot be listened at; whatever loading raised.
        """
        config, service = self.service.config, self.service
        sockets = [listen(config)]
        self._servers = [make_server(application(service), config)]
        if config.admin_port is not None:
            sockets.append(bind("127.0.0.1", config.admin_port))
            self._servers.append(make_server(admin_application(service), config, tls=False))
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        service.on_drain = self.stop
        serving = [
            asyncio.ensure_future(server.serve([one]))
            for server, one in zip(self._servers, sockets, strict=True)
        ]
        loading = asyncio.ensure_future(self._open())
        try:
            url = address(config, sockets[0])
            service.log.write("listening", address=url)
            if config.admin_port is not None:
                service.log.write("admin", address=f"http://127.0.0.1:{sockets[1].getsockname()[1]}")
            ready(url)
            await asyncio.wait([*serving, loading], return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not loading.cancelled():
                loading.result()  # a model that cannot be loaded ends the server
            await asyncio.gather(*serving)
        finally:
            for server in self._servers:
                server.should_exit = server.force_exit = True
            loading.cancel()
            await asyncio.gather(*serving, loading, return_exceptions=True)
            if service.engine is not None:
                closing = service.engine.close()
                if closing is not None:
                    await closing
            service.log.write("ended")
            service.log.close()

    async def _open(self) -> None:
        service = self.service
        if self._load is None:
            return
        engine = await asyncio.to_thread(self._load, service)
        service.engine = engine
        service.loading.clear()
        settle()
        service.log.write("ready", model=service.name)

    def stop(self, seconds: float | None = None) -> None:
        """Drain for at most `seconds`, or `drain_seconds`, then end; the second time end at once."""
        service = self.service
        if self._ending is not None:
            service.log.write("ending", unfinished=len(service.active))
            self._ending.cancel()
            self._abandon()
            return
        service.draining = True
        seconds = service.config.drain_seconds if seconds is None else seconds
        service.log.write("draining", unfinished=len(service.active), seconds=seconds)
        self._ending = asyncio.ensure_future(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        service = self.service
        deadline = asyncio.get_running_loop().time() + seconds
        while service.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if service.active and service.engine is not None:
            with suppress(Exception):  # a dead engine has nothing to end; what is left is cancelled below
                await asyncio.wait_for(service.engine.drain(0.0), 2.0)
            for _ in range(50):  # the last chunks go out
                if not service.active:
                    break
                await asyncio.sleep(0.02)
        self._abandon()

    def _abandon(self) -> None:
        for exchange in list(self.service.active):
            if exchange.task is not None:
                exchange.gone = True
                exchange.task.cancel()
        for server in self._servers:
            server.should_exit = True


def settle() -> None:
    """What is alive now stays so: collections look at what requests make, and take no tens of milliseconds in the middle of streams."""
    gc.collect()
    gc.freeze()


def application(service: Service) -> Application:
    """The API."""
    from gristmill.serve.app import Application
    from gristmill.serve.routes import endpoints

    return Application(service, endpoints(), service.keys)


def admin_application(service: Service) -> Application:
    """The admin plane."""
    from gristmill.serve.admin import ENDPOINTS
    from gristmill.serve.app import Application
    from gristmill.serve.keys import KeyFile

    path = service.config.admin_key_file
    return Application(service, ENDPOINTS, None if path is None else KeyFile(path), local=True)


class _Expected(logging.Filter):
    """Leaves out what uvicorn says of a response that has no end because its client left, did not read, or was cut off by a second signal: the
    request's line in the log has the reason, and stderr may be that log, which is JSON."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ASGI callable returned without")


_EXPECTED = _Expected()


def make_server(app: Application, config: ServeConfig, tls: bool = True) -> uvicorn.Server:
    """uvicorn, without its own log and its own handling of signals."""
    import uvicorn

    from gristmill.serve.bounded_http import BoundedHttp

    logging.getLogger("uvicorn.error").addFilter(_EXPECTED)

    class Quiet(uvicorn.Server):
        def capture_signals(self) -> Any:
            return nullcontext()

    return Quiet(
        uvicorn.Config(
            app,
            http=BoundedHttp,
            ws="none",
            lifespan="on",
            loop="none",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
            ssl_certfile=config.tls_certificate if tls else None,
            ssl_keyfile=config.tls_key if tls else None,
        )
    )


def listen(config: ServeConfig) -> socket.socket:
    """The socket of the API. UsageError: its address is taken, or not ours."""
    if config.uds is not None:
        path = Path(config.uds)
        if path.is_socket() and not _listened_at(path):  # a server that was killed has left it
            path.unlink()
        one = socket.socket(socket.AF_UNIX)
        try:
            one.bind(str(path))
            one.listen(BACKLOG)
        except OSError as error:
            raise UsageError(f"cannot listen at {path}: {error.strerror or error}") from error
        return one
    return bind(config.host, config.port)


def _listened_at(path: Path) -> bool:
    """Whether a program may listen at a Unix socket: all but a refusal says so."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket at an address."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        one = socket.socket(family, kind, protocol)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(place)
        one.listen(BACKLOG)  # from now on connections wait until they are accepted
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; --port 0 takes a free port"
        ) from error
    return one


def address(config: ServeConfig, one: socket.socket) -> str:
    """Where clients reach the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = one.getsockname()[:2]
    scheme = "http" if config.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{(config.root_path or '').rstrip('/')}"
