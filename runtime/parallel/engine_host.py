"""The engine's half of a replica: requests and calls come as messages, and one message goes up after each step. No text, no event loop.

| to the host | |
|---|---|
| ("add", ids, prompt, params of each completion, structured output, priority) | all completions of a prompt, or none |
| ("abort", ids) | end them; nothing comes for them any more |
| ("call", number, name, arguments) | a method of `Calls` |
| ("ping",) | |

| from the host | |
|---|---|
| ("step", load, launched, admitted, preempted, outputs) | what a step did |
| ("refused", id of the first completion, error) | why none was added |
| ("result", number, value), ("failed", number, error) | of a call |
| ("pong",) | |

`admitted` are (id, cached tokens), `outputs` (id, new ids, cached tokens), with a finish reason, logprobs, prompt_logprobs and error where one of
them is there: plain tuples, because most of the time of a message is that of pickling.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gristmill.runtime.engine import Engine
from gristmill.runtime.engine_load import EngineLoad
from gristmill.runtime.engine_thread import EngineDeadError, EngineThread
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.llm import LLM
from gristmill.runtime.ownership import SERVED
from gristmill.runtime.parallel.calls import Calls
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import RequestOutput
from gristmill.runtime.structured_output import StructuredOutput

COMPILERS = 2
"""Threads that compile grammars, while steps go on."""


class EngineHost:
    """Serves the messages of one connection."""

    def __init__(self, connection: Connection, llm: LLM, watchdog_seconds: float) -> None:
        self._connection, self._llm = connection, llm
        self._sending = threading.Lock()
        self._compilers: ThreadPoolExecutor | None = None
        self._compiling: set[str] = set()  # first ids of requests whose grammars are being compiled
        self._end: queue.SimpleQueue[EngineDeadError | None] = queue.SimpleQueue()
        engine = llm.pooling.engine if llm.pools else llm.engine
        engine.ownership.take(SERVED)
        self._thread: EngineThread[Any] = EngineThread(
            engine, self._on_step, self._end.put, watchdog_seconds, lambda: None
        )
        self._calls = Calls(llm, self._thread)
        self._handlers: dict[str, Callable[..., None]] = {
            "add": self._on_add,
            "abort": self._on_abort,
            "call": self._on_call,
            "ping": self._on_ping,
        }

    def serve(self) -> None:
        """Until the parent closes the connection.

        Raises:
            EngineDeadError: the engine has failed.
        """
        threading.Thread(target=self._read, name="gristmill-messages", daemon=True).start()
        if (error := self._end.get()) is not None:
            self._sending.acquire(timeout=1.0)  # nobody else sends any more
            raise error

    def send(self, message: tuple[Any, ...]) -> None:
        """From any thread. A parent that has ended is noticed by others."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending, suppress(OSError):
            self._connection.send_bytes(data)

    def _read(self) -> None:
        try:
            while True:
                kind, *arguments = self._connection.recv()
                with suppress(EngineDeadError):  # which ends the process
                    self._handlers[kind](*arguments)
        except (EOFError, OSError):
            self._end.put(None)

    def _on_ping(self) -> None:
        self.send(("pong",))

    def _on_add(
        self,
        ids: Sequence[str],
        prompt: list[int],
        params: Sequence[SamplingParams],
        structured_output: StructuredOutput | None,
        priority: int,
    ) -> None:
        if structured_output is None:
            none: list[Grammar | None] = [None] * len(ids)
            self._thread.call(lambda engine: self._add(engine, ids, prompt, params, none, priority))
            return
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(COMPILERS, "gristmill-grammars")
        self._compiling.add(ids[0])
        self._compilers.submit(self._compile, ids, prompt, params, structured_output, priority)

    def _compile(
        self,
        ids: Sequence[str],
        prompt: list[int],
        params: Sequence[SamplingParams],
        structured_output: StructuredOutput,
        priority: int,
    ) -> None:
        if ids[0] not in self._compiling:
            return  # its caller has left
        wanted = SamplingParams(n=len(ids), structured_output=structured_output)
        try:
            grammars = self._llm.compile_grammars(wanted)
        except Exception as error:
            self._compiling.discard(ids[0])
            self.send(("refused", ids[0], portable(error)))
            return

        def add(engine: Engine) -> None:
            if ids[0] in self._compiling:
                self._compiling.discard(ids[0])
                self._add(engine, ids, prompt, params, grammars, priority)

        with suppress(EngineDeadError):
            self._thread.call(add)

    def _on_abort(self, ids: Sequence[str]) -> None:
        def abort(engine: Engine) -> None:
            self._compiling.difference_update(ids)
            engine.abort(ids)

        self._thread.call(abort)

    def _on_call(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        def run() -> None:
            try:
                message = ("result", number, self._calls.run(name, arguments))
            except EngineDeadError:
                return  # the process ends
            except BaseException as error:
                message = ("failed", number, portable(error))
            self.send(message)

        # A thread for each: some wait for a long time, and must not keep others from their turn.
        threading.Thread(target=run, name=f"gristmill-{name}", daemon=True).start()

    # In the engine's thread --------------------------------------------------------------------------------------------

    def _add(
        self,
        engine: Engine,
        ids: Sequence[str],
        prompt: list[int],
        params: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None],
        priority: int,
    ) -> None:
        added: list[str] = []
        try:
            for id_, wanted, grammar in zip(ids, params, grammars, strict=True):
                engine.add_request(id_, prompt, wanted, priority, added[0] if added else None, grammar)
                added.append(id_)
        except Exception as error:
            engine.abort(added)
            self.send(("refused", ids[0], portable(error)))

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        engine = self._thread.engine
        if not isinstance(engine, Engine):
            return  # the results of pooling are those of calls
        step = engine.last_step
        admitted: list[tuple[str, int]] = []
        preempted: Sequence[str] = ()
        if step is not None:
            block = engine.scheduler.config.block_size
            admitted = [(id_, len(hits) * block) for id_, hits in step.admitted.items()]
            preempted = list(step.preempted)
        packed = [pack(output) for output in outputs]
        self.send(("step", EngineLoad.of(engine), engine.last_launched, admitted, preempted, packed))


def pack(output: RequestOutput) -> tuple[Any, ...]:
    """An output as a message has it."""
    ids, cached = tuple(output.new_ids), output.cached_tokens
    rest = (output.finish_reason, output.logprobs, output.prompt_logprobs, output.error)
    return (output.id, ids, cached) if rest == (None, (), None, None) else (output.id, ids, cached, *rest)


def unpack(packed: Sequence[Any]) -> RequestOutput:
    """An output from a message."""
    if len(packed) == 3:
        return RequestOutput(packed[0], packed[1], cached_tokens=packed[2])
    id_, ids, cached, finish_reason, logprobs, prompt_logprobs, error = packed
    return RequestOutput(id_, ids, finish_reason, logprobs, prompt_logprobs, error, cached)


def portable(error: BaseException) -> BaseException:
    """An exception that crosses processes: foreign code has some that do not."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
