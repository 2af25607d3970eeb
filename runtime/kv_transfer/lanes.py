"""A thread that talks to a store, which may be slow, or never answer: every wait for it has a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """Runs calls one after the other in a daemon thread, which does not keep the process from ending. `done` is notified after each."""

    def __init__(self, name: str, done: threading.Condition) -> None:
        self._done = done
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._began: float | None = None
        self._submitted = self._ended = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after what was submitted before. A future that is cancelled before its turn is not run."""
        future: Future[T] = Future()
        with self._done:
            self._submitted += 1
        self._calls.put((work, future))
        return future

    def wait(self, seconds: float) -> bool:
        """Wait for the calls that were submitted by now; whether they ended within `seconds`."""
        with self._done:
            place = self._submitted
            return self._done.wait_for(lambda: self._ended >= place, seconds)

    def busy_for(self) -> float:
        """Seconds that the present call has taken so far; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End after the calls that were submitted. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, future = call
            if future.set_running_or_notify_cancel():
                self._began = time.monotonic()
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
                self._began = None
            with self._done:
                self._ended += 1
                self._done.notify_all()
            del call, work, future
