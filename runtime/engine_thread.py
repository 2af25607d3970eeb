"""An engine in a separate thread: calls from any thread run between its steps; a watchdog detects a step or call that does not end."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from gristmill.runtime.errors import ErrorInfo, error_info
from gristmill.runtime.openmp import release_team
from gristmill.runtime.ownership import LEFT_BEHIND, SERVED, Ownership

T = TypeVar("T")
LOG = logging.getLogger("gristmill")


STEP = "a step"
CALLBACKS = "the callbacks of a step"
CALL = "a call"
WAITS = "a wait"


class EngineDeadError(RuntimeError):
    """A step failed, or a step, a callback or a call did not end within the watchdog's time: the engine runs no more, and every unfinished
    request has this error."""

    @property
    def info(self) -> ErrorInfo:
        """The cause, as a code and a message."""
        return error_info(self)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the thread does, since `began` (time.monotonic). It may take `seconds`, if that is longer than the watchdog's limit."""

    what: str
    began: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A function that the thread calls for a future. It may take `seconds`, if that is longer than the watchdog's limit."""

    function: Callable[[], Any]
    future: Future[Any]
    seconds: float = 0.0


class Served(Protocol):
    """An engine that a thread serves: `Engine`, or a `PoolingEngine`. What each does is as of `Engine`."""

    ownership: Ownership

    @property
    def paused(self) -> bool:
        """Whether a step would do nothing."""
        ...

    def has_unfinished(self) -> bool:
        """Whether there is something to do."""
        ...

    def step(self) -> Sequence[Any]:
        """What one step has finished."""
        ...

    def abort(self) -> object:
        """End what is unfinished."""
        ...

    def drain(self, timeout: float | None = None) -> None:
        """Take no more requests."""
        ...

    def dump(self) -> str:
        """The state as text."""
        ...


E = TypeVar("E", bound=Served)


class EngineThread(Generic[E]):
    """Steps an engine while it has work, and sleeps while it has none.

    Args:
        engine: owned by the caller; it is this thread's until `stop`, which gives it back.
        on_step: called in the thread with the outputs of each step.
        on_death: called once, in the thread or the watchdog's, when the engine can run no more.
        watchdog_seconds: the longest time of a step, of its on_step, and of a call; None = any.
        on_stop: called by `stop` before it gives the engine back.
    """

    def __init__(
        self,
        engine: E,
        on_step: Callable[[Any], None],
        on_death: Callable[[EngineDeadError], None],
        watchdog_seconds: float | None,
        on_stop: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.error: EngineDeadError | None = None
        self._on_step, self._on_death, self._on_stop = on_step, on_death, on_stop
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._waits: list[tuple[Callable[[E], bool], Future[None]]] = []
        self._lock = threading.Lock()  # of error, and of calls and waits that must not be added after it
        self._stopping = False
        self._owns = True
        self._ended = threading.Event()
        self._work: _Work | None = None  # None: it waits for work
        self._running_call: Future[Any] | None = None
        release_team()  # of this thread, which loaded the model: from now on the other one computes
        # Daemons: a step that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="gristmill-engine", daemon=True)
        self._thread.start()
        engine.ownership.hand_over(SERVED, self._thread.ident)
        if watchdog_seconds is not None:
            watch = threading.Thread(
                target=self._watch, args=(watchdog_seconds,), name="gristmill-watchdog", daemon=True
            )
            watch.start()

    def call(self, function: Callable[[E], T], seconds: float = 0.0) -> Future[T]:
        """Call function(engine) in the thread, between two steps; the future gets whatever it raises. It may take `seconds`, if that is longer than
        the watchdog's limit.

        Raises:
            EngineDeadError: there will be no step.
        """
        future: Future[T] = Future()
        with self._lock:
            self.raise_if_dead()
            self._calls.put(_Call(lambda: function(self.engine), future, seconds))
        return future

    def wait_for(self, condition: Callable[[E], bool]) -> Future[None]:
        """Done when condition(engine) is true; it is evaluated between steps."""
        future: Future[None] = Future()
        with self._lock:
            self.raise_if_dead()
            self._waits.append((condition, future))
            self._calls.put(_Call(lambda: None, Future()))  # wakes the thread
        return future

    def stop(self, timeout: float | None) -> bool:
        """End after the present step and abort what is unfinished; whether that was within `timeout` seconds. Later calls raise."""
        with self._lock:
            if self.error is None:
                self.error = EngineDeadError("the engine was closed")
                self._stopping = True
                self._calls.put(_Call(lambda: None, Future()))  # wakes it
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._fail_waiters(EngineDeadError("the engine was closed"))
            self.engine.ownership.hand_over(LEFT_BEHIND, self._thread.ident)
            return False
        with self._lock:
            if self._owns:
                self._owns = False
                self.engine.ownership.hand_over(SERVED, threading.get_ident())
                self.engine.abort()
                self._on_stop()
                self.engine.ownership.give_back()
        return True

    def doing(self) -> str:
        """What the thread does, and for how long."""
        work = self._work
        return "it waits" if work is None else f"{work.what} began {time.monotonic() - work.began:.1f} s ago"

    def dump(self) -> str:
        """The state as text, whatever the thread is doing: the engine's, how long it has done what it does, and where it is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        lines = [
            f"engine thread: {'ended' if self._ended.is_set() else 'alive'}",
            self.doing(),
            self._engine_dump(),
        ]
        if frame is not None:
            lines += ["engine thread is at:", *traceback.format_stack(frame)]
        return "\n".join(lines)

    def _engine_dump(self) -> str:
        for _ in range(5):
            try:
                return self.engine.dump()
            except RuntimeError:  # a dictionary changed while it was read
                continue
        return "the engine's state changes too fast to be read"

    def raise_if_dead(self) -> None:
        """EngineDeadError, one of its own for each caller, if the engine runs no more."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    def _run(self) -> None:
        engine = self.engine
        engine.ownership.hand_over(SERVED, threading.get_ident())
        try:
            while self.error is None:
                idle = not engine.has_unfinished() or engine.paused
                self._answer_calls(block=idle)
                # Where a call has ended the last request, a step that has nothing to do says so.
                if self.error is None and (engine.has_unfinished() or not idle) and not engine.paused:
                    self._begin(STEP)
                    outputs = engine.step()
                    if self.error is None:
                        self._begin(CALLBACKS)
                        self._on_step(outputs)
                self._begin(WAITS)
                self._check_waits()
                self._work = None
        except BaseException as error:
            work = self._work
            what = STEP if work is None else work.what
            self.die(f"{what} failed: {type(error).__name__}: {error}", error)
        finally:
            self._ended.set()
            if self._stopping:
                self._fail_waiters(EngineDeadError("the engine was closed"))

    def _begin(self, what: str, seconds: float = 0.0) -> None:
        self._work = _Work(what, time.monotonic(), seconds)

    def _answer_calls(self, block: bool) -> None:
        """Run the calls that are queued now, and no later ones, which must not keep steps waiting; wait for one if there are none
        and `block`."""
        for _ in range(max(1, self._calls.qsize())):
            try:
                call = self._calls.get(block)
            except Empty:
                return
            block = False
            if call.future.set_running_or_notify_cancel():
                self._begin(CALL, call.seconds)
                self._running_call = call.future
                self._answer(call)
                self._running_call = None

    def _answer(self, call: _Call) -> None:
        """Run a call. Whatever it raises is its caller's, SystemExit too: the engine goes on."""
        with suppress(InvalidStateError):  # the watchdog was faster
            try:
                result = call.function()
            except StopIteration as error:  # which no coroutine can raise
                wrong = RuntimeError("the function raised StopIteration")
                wrong.__cause__ = error
                call.future.set_exception(wrong)
            except BaseException as error:
                call.future.set_exception(error)
            else:
                call.future.set_result(result)

    def _check_waits(self) -> None:
        if not self._waits:
            return
        done = [wait for wait in list(self._waits) if wait[0](self.engine)]
        with self._lock:
            done = [wait for wait in done if wait in self._waits]  # those that a death has not ended
            for wait in done:
                self._waits.remove(wait)
        for _, future in done:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _watch(self, limit: float) -> None:
        wait = limit
        while not self._ended.wait(wait):
            work, wait = self._work, limit
            if work is not None:
                longest = max(limit, work.seconds)
                left = work.began + longest - time.monotonic()
                if left <= 0:
                    self.die(f"{work.what} has not ended for {longest} s")
                    return
                wait = min(limit, left)  # what comes next may end sooner

    def die(self, reason: str, cause: BaseException | None = None) -> None:
        """The engine runs no more; what the thread does is not waited for. Nothing happens after a death or `stop`. `cause` is an exception that
        ended the thread.
        """
        error = EngineDeadError(reason)
        error.__cause__ = cause
        with self._lock:
            if self.error is not None:  # closed, or dead already
                return
            self.error = error
        LOG.error("%s\n%s", reason, self.dump(), exc_info=cause)
        self._on_death(error)
        self._fail_waiters(error)
        self._calls.put(_Call(lambda: None, Future()))  # wakes the thread, if it only waits

    def _fail_waiters(self, error: EngineDeadError) -> None:
        with self._lock:
            futures = [future for _, future in self._waits]
            self._waits.clear()
        while True:
            try:
                futures.append(self._calls.get_nowait().future)
            except Empty:
                break
        if (running := self._running_call) is not None:
            with suppress(InvalidStateError):  # it has ended after all
                running.set_exception(error)
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
