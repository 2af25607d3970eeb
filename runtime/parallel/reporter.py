"""How far a process that loads is, told to its parent by a few messages a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

REPORT_SECONDS = 0.1
"""The least time between two reports of one phase."""


class Reporter:
    """The `Progress` of a process that loads: (phase, done, total) to `send`, for each new phase and a few times a second."""

    def __init__(self, send: Callable[[tuple[str, int, int]], Any]) -> None:
        self._send = send
        self._phase, self._next = "", 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        """So far has it come."""
        now = time.monotonic()
        if phase != self._phase or now >= self._next:
            self._phase, self._next = phase, now + REPORT_SECONDS
            self._send((phase, done, total))
