"""A load generator and the server that it measures, in one event loop whose time passes when neither has anything to do: what is measured is
what the server's script says, on any machine.

They are connected by pairs of sockets of this process: what one sends, the other has."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import uvloop

from gristmill.tools.bench_serve import client, command, load
from tests.serve.paced import Paced, Script


class Clock:
    """Seconds since the test began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Selector(selectors.DefaultSelector):
    """Instead of waiting for a timer, moves the clock to it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self._clock.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """Every connection that is made in it goes to the server."""

    def __init__(self, clock: Clock, paced: Paced) -> None:
        super().__init__(Selector(clock))
        self._paced, self.time = paced, clock  # type: ignore[method-assign]

    async def create_connection(self, factory: Callable[[], Any], *where: Any, **options: Any) -> Any:  # type: ignore[override]
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        reader = asyncio.StreamReader(loop=self)
        served = asyncio.StreamReaderProtocol(reader, self._paced.handle, loop=self)
        await self.connect_accepted_socket(lambda: served, there)
        return await super().create_connection(factory, sock=here)


@contextmanager
def serving(script: Script) -> Iterator[Paced]:
    """A server for the runs of `bench serve` in the block, each with a loop of its own."""
    clock, paced = Clock(), Paced(script, "http://paced.test")

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        paced.turn = asyncio.Lock()
        with asyncio.Runner(loop_factory=lambda: Loop(clock, paced)) as runner:
            return runner.run(main)

    times = SimpleNamespace(perf_counter=clock)
    with (
        patch.object(uvloop, "run", run),
        patch.object(client, "time", times),
        patch.object(load, "time", times),
        patch.object(command, "time", times),
    ):
        yield paced
