"""One replica: a process with an `LLM` of its own, started by `Replicas` as ``python -m gristmill.runtime.parallel.replica``.

Messages are (request, kind, arguments), answers (request, item): chunks or the result of a call, then None, or the exception that ended it.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from multiprocessing.connection import Connection
from typing import Any

import torch

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.completion import Chunk
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel import child_process
from gristmill.runtime.parallel.calls import Calls
from gristmill.runtime.sampling_params import SamplingParams


class Replica:
    """Serves the messages of one connection."""

    def __init__(self, connection: Connection, llm: LLM, engine: AsyncEngine) -> None:
        self._connection, self._engine = connection, engine
        self._calls = Calls(llm, engine.thread)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the parent closes the connection. Raises EngineDeadError when the engine has failed."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._receive)
        await self._ended

    def _receive(self) -> None:
        try:
            request, kind, arguments = self._connection.recv()
        except (EOFError, OSError):
            if not self._ended.done():
                self._ended.set_result(None)
            return
        if kind == "ping":
            self._connection.send((request, None))
        elif kind != "abort":
            self._tasks[request] = asyncio.ensure_future(self._answer(request, kind, arguments))
        elif (task := self._tasks.get(request)) is not None:
            task.cancel()

    async def _answer(self, request: str, kind: str, arguments: Any) -> None:
        send = self._connection.send
        try:
            items = getattr(self, kind)(request, *arguments)
            async with aclosing(items):
                async for item in items:
                    send((request, item))
            send((request, None))
        except EngineDeadError as error:
            if not self._ended.done():
                self._ended.set_exception(error)
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # an exception of foreign code that does not cross processes
                error = RuntimeError(f"{type(error).__name__}: {error}")
            send((request, error))
        finally:
            del self._tasks[request]

    def stream(
        self, request: str, prompt: Any, params: Any, priority: int, name: str | None
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a prompt."""
        return self._engine.stream(prompt, params, priority=priority, request_id=name or request)

    async def save(self, request: str, prompt: Any, seconds: float) -> AsyncGenerator[bool, None]:
        """Compute a prompt, and wait until its blocks are in the stores of `kv_transfer`; whether they are."""
        await self._engine.generate(prompt, SamplingParams(max_tokens=1), request_id=request)
        async for (saved,) in self.call(request, "flush_kv_transfer", {"seconds": seconds}):
            yield saved

    async def call(
        self, request: str, name: str, arguments: dict[str, Any]
    ) -> AsyncGenerator[tuple[Any], None]:
        """The result of a method of `Calls`, which may be None, in a tuple."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(self._calls.run(name, arguments))
            except BaseException as error:  # the caller's
                result.set_exception(error)

        # A thread for each: some wait for a long time, and must not keep others from their turn.
        threading.Thread(target=run, name=f"gristmill-{name}", daemon=True).start()
        yield (await asyncio.wrap_future(result),)


def serve(connection: Connection) -> None:
    """Load the model, say so, and serve. The first message: arguments of `LLM`; how many replicas share the CPUs; seconds of a step."""
    model, options, share, watchdog = connection.recv()
    torch.set_num_threads(max(1, torch.get_num_threads() // share))
    llm = LLM(model, **options)
    connection.send(("", None))
    try:
        asyncio.run(Replica(connection, llm, AsyncEngine(llm, watchdog_seconds=watchdog)).serve())
    finally:
        llm.close()


if __name__ == "__main__":
    child_process.serve(serve)
