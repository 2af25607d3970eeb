"""What is asked of all replicas: their states, and changes that one which is started again gets too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gristmill.runtime.engine import PauseMode
from gristmill.runtime.parallel.calls import set_log_level
from gristmill.runtime.parallel.replica_front import ReplicaFront
from gristmill.runtime.residency import Part
from gristmill.runtime.status import EngineStatus


class ReplicaCalls:
    """Calls of `Calls` in every replica; what one raises stands in its place."""

    def __init__(self) -> None:
        self._replicas: list[ReplicaFront] = []
        self._kept: dict[str, dict[str, Any]] = {}  # calls that replicas which are started again get too
        self._lock = threading.Lock()  # of both, and of what decides which replica a request goes to

    async def status(self) -> list[EngineStatus | BaseException]:
        """For each replica its status, or the ReplicaError that says why it serves no more."""
        return await self._call_all("status")

    async def pause(self, mode: PauseMode = "wait") -> list[None | BaseException]:
        """As `AsyncEngine.pause`, for each replica; what one raises stands in its place, here and below."""
        return await self._keep("pause", mode=mode)

    async def resume(self) -> list[None | BaseException]:
        """As `AsyncEngine.resume`, for each replica."""
        self._forget("pause")
        return await self._call_all("resume")

    async def drain(self, timeout: float | None = None) -> list[None | BaseException]:
        """As `AsyncEngine.drain`, for each replica."""
        return await self._keep("drain", timeout=timeout)

    async def sleep(self, level: int = 1) -> list[None | BaseException]:
        """As `Engine.sleep`, for each replica."""
        return await self._keep("sleep", level=level)

    async def wake_up(self, parts: Collection[Part] = ("weights", "kv_cache")) -> list[None | BaseException]:
        """As `Engine.wake_up`, for each replica."""
        self._forget("sleep")
        return await self._call_all("wake_up", parts=tuple(parts))

    async def update_weights(self, path: str | Path) -> list[None | BaseException]:
        """As `Engine.update_weights`, from a directory, for each replica."""
        return await self._keep("update_weights", path=str(path))

    async def reset_prefix_cache(self) -> list[None | BaseException]:
        """As `Engine.reset_prefix_cache`, for each replica."""
        return await self._call_all("reset_prefix_cache")

    async def explain(self) -> list[list[dict[str, Any]] | BaseException]:
        """For each replica the rows of `LLM.explain`."""
        return await self._call_all("explain")

    async def dump(self) -> list[str | BaseException]:
        """For each replica the state of its engine as text, also while a step hangs."""
        return await self._call_all("dump")

    async def set_log_level(self, level: str) -> list[None | BaseException]:
        """Set that of the logger ``gristmill``, in this process and in each replica: ``debug``, ``info``, ``warning`` or ``error``."""
        set_log_level(level)
        return await self._keep("set_log_level", level=level)

    async def profile(self, steps: int, path: str | Path) -> list[str | BaseException]:
        """Write a trace of the next `steps` steps of each replica, for chrome://tracing or Perfetto. Returns the files: `path`, and with several
        replicas their numbers before its suffix. UsageError: another profile is being taken."""
        path = Path(path).absolute()
        paths = [path]
        if len(self._replicas) > 1:
            paths = [path.with_stem(f"{path.stem}-{number}") for number in range(len(self._replicas))]
        calls = (
            replica.call("profile", steps=steps, path=str(one))
            for replica, one in zip(self._replicas, paths, strict=True)
        )
        files: list[str | BaseException] = await asyncio.gather(*calls, return_exceptions=True)
        return files

    async def _keep(self, name: str, **arguments: Any) -> list[Any]:
        """Call all; a replica that is started again is called likewise, in the order of the calls."""
        answers = await self._call_all(name, **arguments)
        if not all(isinstance(answer, BaseException) for answer in answers):  # which nobody has done
            with self._lock:
                self._kept.pop(name, None)
                self._kept[name] = arguments
        return answers

    def _forget(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)

    async def _call_all(self, name: str, **arguments: Any) -> list[Any]:
        calls = (replica.call(name, **arguments) for replica in self._replicas)
        return await asyncio.gather(*calls, return_exceptions=True)
