"""Who steps an engine. Its scheduler takes the results of steps in their order, so two callers at a time would break it."""

from __future__ import annotations

import threading

from gristmill.runtime.errors import UsageError

SERVED = (
    "an AsyncEngine serves this model: send requests to it, which any number of event loops may share, change the Engine "
    "by await engine.call(...), or end it first: await engine.close()"
)
LEFT_BEHIND = "an AsyncEngine that was closed has left a thread behind which has not ended its last step"
STREAMED = "a generate or stream of this LLM has not ended: exhaust its iterator or close() it first; requests at the same time need an AsyncEngine"


class Ownership:
    """At most one owner at a time, which may be bound to one thread. Without an owner, any caller may step the engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: str | None = None
        self._thread: int | None = None

    def take(self, owner: str, *, any_thread: bool = False) -> None:
        """Own the engine, in this thread only unless any_thread. `owner` is what others are told, and what they can do.

        Raises:
            UsageError: the engine has an owner.
        """
        with self._lock:
            if self._owner is not None:
                raise UsageError(self._owner)
            self._owner = owner
            self._thread = None if any_thread else threading.get_ident()

    def hand_over(self, owner: str, thread: int | None) -> None:
        """From now on the owner is known by this text, and works in this thread."""
        self._owner, self._thread = owner, thread

    def give_back(self) -> None:
        """Release the engine."""
        with self._lock:
            self._owner = self._thread = None

    def check(self) -> None:
        """UsageError: the engine is another thread's."""
        thread, owner = self._thread, self._owner
        if thread is not None and owner is not None and thread != threading.get_ident():
            raise UsageError(owner)
