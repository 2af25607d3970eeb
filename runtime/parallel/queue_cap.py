"""The caps of a queue that several engines share."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from gristmill.runtime.scheduler import QueueFull


class QueueCap:
    """Counts the completions that no step has had yet, wherever they wait. For any thread.

    Args:
        most: the most of them; None = any number.
        most_tokens: the most tokens that their prompts have together, unless it is one alone; None = any number.
    """

    def __init__(self, most: int | None, most_tokens: int | None) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, name: str, ids: Iterable[str], tokens: int) -> None:
        """Take the completions of a request, each with a prompt of `tokens`, all or none.

        Raises:
            QueueFull: too many wait.
        """
        ids = list(ids)
        with self._lock:
            waiting, count = len(self._waiting), len(ids)
            if self._most is not None and waiting + count > self._most:
                more = (
                    "which"
                    if waiting >= self._most
                    else f"with its {count} completions more than {self._most}, which"
                )
                raise QueueFull(
                    f"request {name!r} refused: {waiting} requests are waiting, {more} is max_queued"
                )
            most = self._most_tokens
            if most is not None and self._tokens and self._tokens + count * tokens > most:
                raise QueueFull(
                    f"request {name!r} refused: {self._tokens} prompt tokens are waiting, with its {count * tokens} "
                    f"more than max_queued_tokens ({most})"
                )
            self._waiting.update(dict.fromkeys(ids, tokens))
            self._tokens += count * tokens

    def leave(self, ids: Iterable[str]) -> None:
        """They wait no more; nothing for those that have left already."""
        with self._lock:
            for id_ in ids:
                self._tokens -= self._waiting.pop(id_, 0)
