"""Signal handlers that drain the engine of an event loop: installed while it serves, and replaced by the former ones afterwards."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Any

from gristmill.runtime.engine_thread import EngineDeadError, EngineThread
from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import check_timeout

SIGNAL_SECONDS = 1.0
"""How long the present step may take after a second signal."""


class DrainSignals:
    """Handlers of signals, from now until `restore`, which puts the former ones back.

    A signal that nothing would act on (after `restore`, `serves` is false, the loop has ended) goes to the former
    handler, and is never lost. `loop.add_signal_handler` does not return former handlers, so these are set by the module `signal`.

    Args:
        loop: the running event loop of the main thread.
        signals: each with one handler.
        serves: whether `on_signal` would have an effect.
        on_signal: called in the loop with 1 for the first signal, 2 for the second; then the handlers are restored, so that a third one
            does what it did before. False = it had no effect after all.

    Raises:
        UsageError: this is not the main thread, which alone gets signals.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        signals: Iterable[signal.Signals],
        serves: Callable[[], bool],
        on_signal: Callable[[int], bool],
    ) -> None:
        if not _in_main_thread():
            raise UsageError(
                "signals come to the main thread alone: call drain_on_signals in its event loop, not in "
                f"thread {threading.current_thread().name!r}"
            )
        self._loop, self._serves, self._on_signal = loop, serves, on_signal
        self._active, self._count = True, 0
        self._former: dict[int, Any] = {}
        try:
            for number in dict.fromkeys(signals):
                self._former[number] = signal.signal(number, self._handle)
                signal.siginterrupt(number, False)  # as asyncio's: system calls of other libraries go on
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Put the former handlers back, but for those that others have replaced since. From any thread."""
        self._active = False
        if _in_main_thread():
            for number, former in self._former.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if former is None else former)
        else:
            with suppress(RuntimeError):  # the loop was closed: the next signal does it
                self._loop.call_soon_threadsafe(self.restore)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between any two bytecode instructions: it must not take locks."""
        if self._active and self._serves() and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._arrived, number)
        else:
            self._pass_on(number, frame)

    def _arrived(self, number: int) -> None:
        self._count += 1
        if not self._active or not self._on_signal(self._count):
            self._pass_on(number, None)
        elif self._count == 2:
            self.restore()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.restore()
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def drain_on_signals(
    thread: EngineThread[Any], timeout: float | None, signals: Iterable[signal.Signals]
) -> DrainSignals:
    """Drain the engine at the first signal, with a timeout of 0 at the second. Raises as `AsyncEngine.drain_on_signals`."""
    check_timeout(timeout)
    thread.raise_if_dead()
    loop = asyncio.get_running_loop()

    def on_signal(count: int) -> bool:
        try:
            drained = thread.call(lambda engine: engine.drain(timeout if count == 1 else 0.0))
        except EngineDeadError:
            return False
        if count > 1:
            loop.call_later(SIGNAL_SECONDS, give_up, drained)
        return True

    def give_up(drained: Future[None]) -> None:
        if not drained.done() or thread.engine.has_unfinished():
            thread.die(f"requests have not ended {SIGNAL_SECONDS} s after a second signal: {thread.doing()}")

    return DrainSignals(loop, signals, lambda: thread.error is None, on_signal)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
