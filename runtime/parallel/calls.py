"""What the front end of replicas may call in one by name: each method of `Calls`, with keyword arguments."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING, Any

from gristmill.runtime.engine import Engine, PauseMode
from gristmill.runtime.engine_thread import LOG, EngineThread
from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import plain
from gristmill.runtime.llm import LLM
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.residency import Part
from gristmill.runtime.sampling_params import check_integers
from gristmill.runtime.status import EngineStatus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

UPDATE_SECONDS = 3600.0
"""How long new weights may take from a disk, before the engine counts as dead."""
LEVELS = ("debug", "info", "warning", "error")


class Calls:
    """Calls between two steps of an engine. Each blocks, in a thread of its own, until it has its result.

    Raises:
        EngineDeadError: by each: the engine runs no more.
    """

    def __init__(self, llm: LLM, thread: EngineThread[Any]) -> None:
        self._llm, self._thread = llm, thread
        self._profiles = Lock()
        self._pooled: dict[str, list[Future[Tensor]]] = {}  # results of `pool` that are not all there

    def run(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of the method NAME. UsageError if there is none."""
        if name not in NAMES:
            raise UsageError(f"a replica has no call {name!r}, only {', '.join(NAMES)}")
        if name in (GENERATING if self._llm.pools else POOLING):
            what = "for embeddings or scores" if self._llm.pools else "that generates text"
            raise UsageError(f"{name} is not for a model {what}")
        return getattr(self, name)(**arguments)

    def pool(self, key: str, inputs: list[PoolingInput]) -> list[NDArray[np.float32]]:
        """The results of sequences, as of `PoolingEngine.add`. `key` names the call for `cancel`."""
        results: list[Future[Tensor]] = self._thread.call(lambda engine: engine.add(inputs)).result()
        self._pooled[key] = results
        try:
            return [result.result().numpy() for result in results]
        finally:
            del self._pooled[key]

    def cancel(self, key: str) -> None:
        """Nobody waits for the results of a call of `pool`: what is in no batch yet is dropped."""
        for result in self._pooled.get(key, ()):
            result.cancel()

    def pause(self, mode: PauseMode = "wait") -> None:
        """As `AsyncEngine.pause`."""
        self._thread.call(lambda engine: engine.pause(mode)).result()
        self._thread.wait_for(
            lambda engine: engine.paused or not isinstance(engine, Engine) or engine.scheduler.paused is None
        ).result()

    def resume(self) -> None:
        """As `Engine.resume`."""
        self._thread.call(lambda engine: engine.resume()).result()

    def drain(self, timeout: float | None = None) -> None:
        """As `AsyncEngine.drain`."""
        self._thread.call(lambda engine: engine.drain(timeout)).result()
        self._thread.wait_for(lambda engine: not engine.has_unfinished()).result()

    def sleep(self, level: int = 1) -> None:
        """As `Engine.sleep`."""
        self._thread.call(lambda engine: engine.sleep(level)).result()

    def wake_up(self, parts: Collection[Part] = ("weights", "kv_cache")) -> None:
        """As `Engine.wake_up`."""
        self._thread.call(lambda engine: engine.wake_up(parts)).result()

    def update_weights(self, path: str) -> None:
        """As `Engine.update_weights`, from a directory."""
        self._thread.call(lambda engine: engine.update_weights(path), UPDATE_SECONDS).result()

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`."""
        self._thread.call(lambda engine: engine.reset_prefix_cache()).result()

    def status(self) -> EngineStatus:
        """As `Engine.status`."""
        status: EngineStatus = self._thread.call(lambda engine: engine.status()).result()
        return status

    def explain(self) -> list[dict[str, Any]]:
        """As `LLM.explain`."""
        return self._thread.call(lambda engine: self._llm.explain()).result()

    def dump(self) -> str:
        """As `AsyncEngine.dump`, also while a step hangs."""
        return self._thread.dump()

    def flush_kv_transfer(self, seconds: float) -> bool:
        """As `Engine.flush_kv_transfer`, while steps go on."""
        flushed: bool = self._thread.call(lambda engine: engine.flush_kv_transfer).result()(seconds)
        return flushed

    def set_log_level(self, level: str) -> None:
        """That of the logger ``gristmill``."""
        set_log_level(level)

    def profile(self, steps: int, path: str) -> str:
        """Write the trace of the next `steps` steps to `path`, for chrome://tracing or Perfetto; a step without requests is none. Returns
        the path.

        Raises:
            UsageError: another profile is being taken. OSError: the file cannot be written.
        """
        steps = plain(steps)
        check_integers(steps=steps)
        with open(path, "w"):  # a path that is wrong is refused before the steps are waited for
            pass
        if not self._profiles.acquire(blocking=False):
            raise UsageError("another profile is being taken: wait for its steps")
        try:
            from torch.profiler import profile

            profiler = profile()
            seen = self._thread.call(lambda engine: _start(profiler, engine)).result()
            left = steps

            def done(engine: Engine) -> bool:
                """Called after each step, and between steps."""
                nonlocal seen, left
                if engine.last_step is not None and engine.last_step is not seen:
                    seen, left = engine.last_step, left - 1
                if left > 0:
                    return False
                profiler.stop()
                return True

            self._thread.wait_for(done).result()
            profiler.export_chrome_trace(path)
        finally:
            self._profiles.release()
        return path


def _start(profiler: Any, engine: Engine) -> Any:
    """Begin in the thread of the steps, which is the one that is recorded."""
    profiler.start()
    return engine.last_step


def set_log_level(level: str) -> None:
    """Set that of the logger ``gristmill`` of this process. UsageError: there is no such level."""
    if level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    LOG.setLevel(logging.getLevelNamesMapping()[level.upper()])


POOLING = ("pool", "cancel")
"""Calls of models for embeddings and scores alone; those of models that generate text alone are GENERATING."""
GENERATING = ("sleep", "wake_up", "update_weights", "reset_prefix_cache", "flush_kv_transfer", "profile")
NAMES = tuple(name for name in vars(Calls) if not name.startswith("_") and name != "run")
