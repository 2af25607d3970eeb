"""AsyncEngine: many coroutines, one engine.

engine = AsyncEngine(LLM("examples/models/docs-llama"))
async for chunk in engine.stream("The index", SamplingParams(max_tokens=32)):
    print(chunk.text, end="")
await engine.close()
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gristmill.runtime.async_request import NO_TOKENIZER, ActiveRequest, ActiveRequests, AsyncPrompts
from gristmill.runtime.chat.answer import ChatAnswer
from gristmill.runtime.chat.chat import prepare_chat
from gristmill.runtime.chat.conversation import ChatOptions, Message
from gristmill.runtime.drain_signals import DrainSignals, drain_on_signals
from gristmill.runtime.engine import Engine, PauseMode
from gristmill.runtime.engine_thread import LOG, EngineDeadError, EngineThread
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.kv_cache.events import CacheEvent
from gristmill.runtime.llm import LLM, NO_TEXT
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.ownership import SERVED
from gristmill.runtime.pooling.async_pooling import AsyncPooling, PoolingMethods
from gristmill.runtime.pooling.engine import PoolingInput, PoolingQueue
from gristmill.runtime.request_front import RequestFront
from gristmill.runtime.sampling_params import SamplingParams, check_integers, is_seconds
from gristmill.runtime.scheduler import RequestOutput
from gristmill.runtime.status import EngineStatus
from gristmill.runtime.structured_output import StructuredOutput

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from torch import Tensor

T = TypeVar("T")

MAX_QUEUED = 1024
"""The default limit of waiting requests: a few steps' worth. More would only wait longer and take memory."""


class AsyncEngine(PoolingMethods, RequestFront):
    """Serves requests of any number of coroutines, in one event loop or several, by one engine in a thread of its own.

    Outputs are decoded in the caller's event loop, one wake-up per step. A caller that reads slowly gets fewer and larger chunks:
    what waits for it is one chunk for each completion. New requests are refused by the caps of the queue (QueueFull).

    Args:
        llm: the model, which is this engine's until `close`: others get a UsageError. An `Engine` serves prompts of token ids, without
            text.
        watchdog_seconds: longest time of a step, of its callbacks (metrics, on_cache_events) and of a `call`, after which the engine counts
            as dead; None = any. First steps may compile kernels.
        metrics: a `Metrics` to report to; None = none.
        tracer: an OpenTelemetry tracer, for a span for each request under the caller's current span; None = none.
        max_queued: waiting requests beyond which a request is refused (QueueFull), for an engine without a max_queued of its own; None = any
            number.
        on_cache_events: called in the engine's thread after each step and call that changed the prefix cache, with the events; it must
            not block. The first ones say what the cache holds already. None = they are not recorded.

    When a step fails, or a step, a callback or a call does not end within watchdog_seconds, every unfinished request and call ends with
    EngineDeadError, and so does every later one; the state is logged (logger ``gristmill``).

    Raises:
        UsageError: an invalid argument; another AsyncEngine serves the model, or a `LLM.stream` of it has not ended.
    """

    def __init__(
        self,
        llm: LLM | Engine,
        *,
        watchdog_seconds: float | None = 300.0,
        max_queued: int | None = MAX_QUEUED,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        on_cache_events: Callable[[list[CacheEvent]], None] | None = None,
    ) -> None:
        if not isinstance(llm, LLM | Engine):
            raise UsageError(f"AsyncEngine serves an LLM or an Engine, got {type(llm).__name__}")
        if watchdog_seconds is not None and not (is_seconds(watchdog_seconds) and watchdog_seconds > 0):
            raise UsageError(f"watchdog_seconds must be a positive number or None, got {watchdog_seconds!r}")
        check_integers(max_queued=max_queued)
        self._llm = llm if isinstance(llm, LLM) else None
        prompts = AsyncPrompts.of(llm) if isinstance(llm, LLM) else AsyncPrompts(None, _no_grammars)
        self._on_cache_events = on_cache_events
        self._signals: DrainSignals | None = None
        engine: Engine | PoolingQueue
        if isinstance(llm, LLM) and llm.pools:
            engine = llm.pooling.engine
            limit, waiting = engine.max_queued, lambda: 0
            self._pooling = AsyncPooling(llm.pooling, self._compute, max_queued if limit is None else None)
        else:
            engine = llm.engine if isinstance(llm, LLM) else llm
            scheduler = engine.scheduler
            limit, waiting = scheduler.config.max_queued, lambda: len(scheduler.waiting) + len(scheduler.held)
        super().__init__(
            prompts, ActiveRequests(waiting, max_queued if limit is None else limit), metrics, tracer
        )
        engine.ownership.take(SERVED)
        try:
            if on_cache_events is not None and isinstance(engine, Engine):
                engine.record_cache_events()
            self._thread: EngineThread[Any] = EngineThread(
                engine, self._on_step, self._on_death, watchdog_seconds, self._on_stop
            )
        except BaseException:
            engine.ownership.give_back()
            raise

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def thread(self) -> EngineThread[Any]:
        """The thread of the engine, for calls from other threads."""
        return self._thread

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine stopped serving; None while it serves."""
        return self._thread.error

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> ChatAnswer:
        """The model's answer in a conversation. Arguments and errors are those of `LLM.chat` and `stream`; being cancelled aborts it."""
        if self._llm is None:
            raise UsageError(NO_TOKENIZER)
        chat = self._llm.conversations
        ids, params, growing = await asyncio.to_thread(prepare_chat, chat, messages, params, options)
        async with aclosing(self.stream(ids, params, priority=priority, request_id=request_id)) as stream:
            async for chunk in stream:
                growing.add(chunk)
        return growing.answer()

    async def _compute(self, inputs: list[PoolingInput]) -> list[Tensor]:
        """The results of sequences, from the engine's thread."""
        add = self._thread.call(lambda engine: engine.add(inputs))
        try:
            results: list[Tensor] = await asyncio.gather(
                *map(asyncio.wrap_future, await asyncio.wrap_future(add))
            )
            return results
        except EngineDeadError as error:  # one death has many callers: each gets an exception of its own
            raise EngineDeadError(str(error)) from error.__cause__

    async def abort(self, request_id: str) -> bool:
        """End a request: its callers get a last chunk with finish_reason ``abort``. Returns whether it was unfinished."""

        def end(engine: Engine) -> bool:
            outputs = engine.abort(self._requests.ids(request_id))
            self._deliver(outputs)
            return bool(outputs)

        return await asyncio.wrap_future(self._thread.call(end))

    async def pause(self, mode: PauseMode = "wait") -> None:
        """`Engine.pause`; returns when the mode's condition holds, or the engine was resumed meanwhile."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.pause(mode)))
        await asyncio.wrap_future(
            self._thread.wait_for(
                lambda engine: (
                    engine.paused or not isinstance(engine, Engine) or engine.scheduler.paused is None
                )
            )
        )

    async def resume(self) -> None:
        """`Engine.resume`."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.resume()))

    async def drain(self, timeout: float | None = None) -> None:
        """`Engine.drain`; returns when no request is unfinished."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.drain(timeout)))
        await asyncio.wrap_future(self._thread.wait_for(lambda engine: not engine.has_unfinished()))

    def drain_on_signals(
        self,
        timeout: float | None = None,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        """Drain when the process gets one of the signals: unfinished requests have `timeout` seconds.

        A second signal ends them at once; if the engine's thread does not do it within a second, because a step hangs, the engine is
        dead and they end with EngineDeadError. The former handlers are put back then, by `close`, and when the engine dies: from then on a
        signal does what it did before. Call it in the event loop of the main thread.

        Raises:
            UsageError: another thread's event loop, or a negative timeout.
            EngineDeadError: the engine serves no more.
        """
        if self._signals is not None:
            self._signals.restore()
        self._signals = drain_on_signals(self._thread, timeout, signals)

    async def drained(self) -> None:
        """Returns when `drain` was called, by a caller or a signal, and no request is unfinished."""
        await asyncio.wrap_future(
            self._thread.wait_for(lambda engine: engine.draining and not engine.has_unfinished())
        )

    async def call(self, function: Callable[[Engine], T], *, watchdog_seconds: float = 0.0) -> T:
        """Call function(engine) between two steps in the engine's thread: ``await engine.call(lambda e: e.update_weights(path))``.

        This is for `Engine.sleep`, `wake_up`, `update_weights`, `reset_prefix_cache` and `status`. Requests wait meanwhile. An exception of the
        function is raised here, and the engine goes on.

        Args:
            watchdog_seconds: how long the call may take, if longer than the engine's watchdog_seconds; weights on a slow disk need it.
        """

        if not is_seconds(watchdog_seconds):
            raise UsageError(f"watchdog_seconds of a call must be at least 0, got {watchdog_seconds!r}")

        def run(engine: Engine) -> T:
            try:
                return function(engine)
            finally:
                self._publish(engine)

        return await asyncio.wrap_future(self._thread.call(run, watchdog_seconds))

    async def check_health(self, timeout: float | None = None) -> EngineStatus:
        """The engine's status, as soon as its thread answers between two steps.

        Raises:
            EngineDeadError: the engine runs no more.
            TimeoutError: it did not answer within `timeout` seconds; None = no limit.
        """
        return await asyncio.wait_for(self.call(lambda engine: engine.status()), timeout)

    def resync_cache_events(self) -> None:
        """Hand on_cache_events an AllBlocksCleared and the blocks that the cache holds, between two steps, and from then on what changes: for
        a router that begins to listen, or has lost events. Returns at once; from any thread.

        Raises:
            UsageError: there is no on_cache_events.
            EngineDeadError: the engine runs no more.
        """
        if self._on_cache_events is None:
            raise UsageError("there is nobody to tell what the cache holds: AsyncEngine(on_cache_events=...)")

        def run(engine: Engine) -> None:
            engine.record_cache_events()
            self._publish(engine)

        self._thread.call(run).add_done_callback(_log_failure)

    def dump(self) -> str:
        """The state of the engine as text: queues, blocks, requests, and where its thread is. From any thread, also while a step
        hangs."""
        return self._thread.dump()

    async def close(self, timeout: float = 10.0) -> None:
        """Stop after the present step; unfinished requests get EngineDeadError. Waits `timeout` seconds for the step, then abandons
        its thread. To let requests finish, `drain` first."""
        if self._signals is not None:
            self._signals.restore()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop, timeout)
        self._on_death(EngineDeadError("the engine was closed"))

    async def _add(
        self,
        request: ActiveRequest,
        ids: Sequence[int],
        params: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None],
        structured_output: StructuredOutput | None,
        priority: int,
    ) -> None:
        if self._pooling is not None:
            raise UsageError(f"the model {NO_TEXT}")
        await asyncio.wrap_future(
            self._thread.call(lambda engine: self._add_all(engine, request, ids, params, grammars, priority))
        )

    # In the engine's thread --------------------------------------------------------------------------------------------

    def _add_all(
        self,
        engine: Engine,
        request: ActiveRequest,
        ids: Sequence[int],
        params: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None],
        priority: int,
    ) -> None:
        """Add all completions of a prompt, or none."""
        self._requests.arrived(request)
        names = list(request.open)
        if not names:
            return  # its caller has left
        added: list[str] = []
        try:
            for name, choice_params, grammar in zip(names, params, grammars, strict=True):
                engine.add_request(name, ids, choice_params, priority, added[0] if added else None, grammar)
                added.append(name)
            request.added = True
        except BaseException:
            engine.abort(added)
            raise

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        engine = self._thread.engine
        if not isinstance(engine, Engine):
            return  # results have gone to their futures
        if self._metrics is not None:
            self._metrics.step(engine)
        self._publish(engine)
        step = engine.last_step
        if step is not None:
            for name, hits in step.admitted.items():
                if (request := self._requests.added(name)) is not None:
                    cached_tokens = len(hits) * engine.scheduler.config.block_size
                    self._scheduled(request, name, cached_tokens, engine.last_launched)
            for name in step.preempted:
                if (request := self._requests.added(name)) is not None:
                    self._preempted(request, name)
        self._deliver(outputs)

    def _publish(self, engine: Engine | PoolingQueue) -> None:
        if (
            isinstance(engine, Engine)
            and self._on_cache_events is not None
            and (events := engine.take_cache_events())
        ):
            self._on_cache_events(events)

    def _on_death(self, error: EngineDeadError) -> None:
        if self._signals is not None:
            self._signals.restore()
        if self._pooling is not None:
            self._pooling.front.engine.fail(error)
        for request in self._requests.all():
            with suppress(RuntimeError):  # its loop was closed
                request.loop.call_soon_threadsafe(request.fail, error)

    def _on_stop(self) -> None:
        if self._on_cache_events is not None and self._pooling is None:
            self._thread.engine.record_cache_events(False)

    def _abort(self, ids: Sequence[str]) -> None:
        with suppress(EngineDeadError):  # there is nothing left to abort then
            self._thread.call(lambda engine: engine.abort(ids))


def _no_grammars(params: SamplingParams) -> list[Grammar | None]:
    raise UsageError(NO_TOKENIZER)


def _log_failure(future: Future[None]) -> None:
    """Log the failure of a call that no caller waits for."""
    error = future.exception()
    if error is not None and not isinstance(error, EngineDeadError):
        LOG.error("on_cache_events failed: %s: %s", type(error).__name__, error, exc_info=error)
