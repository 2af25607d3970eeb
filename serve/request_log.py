"""The log of the server: one JSON object per line, written by a thread of its own, so that no request waits for a disk or a pipe."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gristmill.runtime.errors import UsageError

KEPT = 10_000
"""Lines that may wait to be written. Further ones are dropped, and counted in the next line that is written."""


class RequestLog:
    """Lines for a file, or stderr. Where they cannot be written, they are dropped: the log never stops the server.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.dropped = 0
        try:
            self._file: BinaryIO = (
                sys.stderr.buffer if path is None else open(path, "ab", buffering=0)  # noqa: SIM115
            )
        except OSError as error:
            raise UsageError(f"cannot write the log {path}: {error.strerror or error}") from error
        self._lines: queue.Queue[bytes | None] = queue.Queue(KEPT)
        self._thread = threading.Thread(target=self._work, name="gristmill-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, event: str, **values: Any) -> None:
        """Add a line, with the time and these values. Never blocks, never raises."""
        now = time.time()
        try:
            line = msgspec.json.encode({"time": round(now, 6), "event": event, **values}, enc_hook=str)
            self._lines.put_nowait(line + b"\n")
        except (queue.Full, TypeError, ValueError, UnicodeError):
            self.dropped += 1

    def close(self, timeout: float = 2.0) -> None:
        """Write what waits, for at most `timeout` seconds."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self.dropped = self.dropped, 0
            if dropped:
                line += msgspec.json.encode({"event": "log_lines_dropped", "count": dropped}) + b"\n"
            try:
                self._file.write(line)
                self._file.flush()
            except (OSError, ValueError):  # a full disk, a closed pipe
                self.dropped += dropped + 1
