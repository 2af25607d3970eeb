"""An engine in a separate thread: calls from any thread run between its steps; a watchdog detects a step that does not end."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from gristmill.runtime.engine import Engine
from gristmill.runtime.scheduler import RequestOutput

T = TypeVar("T")
LOG = logging.getLogger("gristmill")


class EngineDeadError(RuntimeError):
    """A step failed or did not end: the engine runs no more, and every unfinished request has this error."""


class EngineThread:
    """Steps an engine while it has work, and sleeps while it has none.

    engine: must not be used by other threads. on_step: called in the thread with the outputs of each step. on_death: called once, in
    the thread or the watchdog's, when the engine can run no more. watchdog_seconds: longest time of a step; None = any.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[list[RequestOutput]], None],
        on_death: Callable[[EngineDeadError], None],
        watchdog_seconds: float | None,
    ) -> None:
        self.engine = engine
        self.error: EngineDeadError | None = None
        self._on_step, self._on_death = on_step, on_death
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._waits: list[tuple[Callable[[Engine], bool], Future[None]]] = []
        self._lock = threading.Lock()  # of error, and of calls and waits that must not be added after it
        self._stopping = False
        self._ended = threading.Event()
        self._step_began: float | None = None
        # Daemons: a step that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="gristmill-engine", daemon=True)
        self._thread.start()
        if watchdog_seconds is not None:
            watch = threading.Thread(
                target=self._watch, args=(watchdog_seconds,), name="gristmill-watchdog", daemon=True
            )
            watch.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call function(engine) in the thread, between two steps. EngineDeadError if there will be none."""
        future: Future[T] = Future()
        with self._lock:
            self._raise_if_dead()
            self._calls.put((lambda: function(self.engine), future))
        return future

    def wait_for(self, condition: Callable[[Engine], bool]) -> Future[None]:
        """Done when condition(engine) is true; it is evaluated between steps."""
        future: Future[None] = Future()
        with self._lock:
            self._raise_if_dead()
            self._waits.append((condition, future))
            self._calls.put((lambda: None, Future()))  # wakes the thread
        return future

    def stop(self, timeout: float | None) -> bool:
        """End after the present step and abort what is unfinished; whether that was within `timeout` seconds. Later calls raise."""
        with self._lock:
            if self.error is None:
                self.error = EngineDeadError("the engine was closed")
                self._stopping = True
                self._calls.put((lambda: None, Future()))  # wakes it
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self.engine.abort()
        return True

    def dump(self) -> str:
        """The state as text, whatever the thread is doing: the engine's, how long its step has run, and where it is."""
        began = self._step_began
        frame = sys._current_frames().get(self._thread.ident or 0)
        lines = [
            f"engine thread: {'ended' if self._ended.is_set() else 'alive'}",
            "no step is running" if began is None else f"its step began {time.monotonic() - began:.1f} s ago",
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

    def _raise_if_dead(self) -> None:
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    def _run(self) -> None:
        engine = self.engine
        try:
            while self.error is None:
                idle = not engine.has_unfinished() or engine.paused
                self._answer_calls(block=idle)
                if self.error is None and engine.has_unfinished() and not engine.paused:
                    self._step_began = time.monotonic()
                    outputs = engine.step()
                    self._step_began = None
                    if self.error is None:
                        self._on_step(outputs)
                self._check_waits()
        except BaseException as error:
            self._die(f"a step failed: {type(error).__name__}: {error}", error)
        finally:
            self._ended.set()
            if self._stopping:
                self._fail_waiters(EngineDeadError("the engine was closed"))

    def _answer_calls(self, block: bool) -> None:
        """Run the calls that are queued now, and no later ones, which must not keep steps waiting; wait for one if there are none
        and `block`."""
        for _ in range(max(1, self._calls.qsize())):
            try:
                function, future = self._calls.get(block)
            except Empty:
                return
            block = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _check_waits(self) -> None:
        if not self._waits:
            return
        done = [(condition, future) for condition, future in self._waits if condition(self.engine)]
        for wait in done:
            self._waits.remove(wait)
            if wait[1].set_running_or_notify_cancel():
                wait[1].set_result(None)

    def _watch(self, limit: float) -> None:
        wait = limit
        while not self._ended.wait(wait):
            began = self._step_began
            wait = limit if began is None else began + limit - time.monotonic()
            if wait <= 0:
                self._die(f"a step has not ended for {limit} s", None)
                return

    def _die(self, reason: str, cause: BaseException | None) -> None:
        error = EngineDeadError(reason)
        error.__cause__ = cause
        with self._lock:
            if self.error is not None:  # closed, or dead already
                return
            self.error = error
        LOG.error("%s\n%s", reason, self.dump(), exc_info=cause)
        self._on_death(error)
        self._fail_waiters(error)

    def _fail_waiters(self, error: EngineDeadError) -> None:
        futures = [future for _, future in self._waits]
        self._waits.clear()
        while True:
            try:
                futures.append(self._calls.get_nowait()[1])
            except Empty:
                break
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
