"""An on-disk journal of the kernels under verification on an accelerator: a crash of the machine is attributed to one of them.

The verifying process holds an exclusive lock on the file, which lists these kernels. The lock ends with the process, the content
stays: entries in an unlocked file were left by a process that died during a verification. Processes therefore verify one after
another. Threads of one process share the lock; if several of them were verifying, the crash cannot be attributed, and their
kernels are verified again one at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from gristmill.kernel_registry.store import Verification

POLL = 0.05
"""Seconds between attempts to take a lock that another process holds."""


class Mark:
    """The mark at `path` for the trials of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._file: IO[str] | None = None  # locked while a trial runs
        self._trials: list[Verification] = []

    @contextmanager
    def trial(self, record: Verification, patience: float) -> Iterator[tuple[Verification, ...]]:
        """Hold the mark for a trial; yields the records that a process which died had left in it.

        Args:
            record: the record that the store gets if this process dies.
            patience: seconds to wait for other processes' trials.

        Raises:
            OSError: the file cannot be made. TimeoutError: another process holds it for longer than `patience`.
        """
        with self._mutex:
            left_records = self._take(patience) if self._file is None else ()
            self._trials.append(record)
            self._write()
        try:
            yield left_records
        finally:
            # An exception is no crash; the caller handles it.
            with self._mutex:
                self._trials.remove(record)
                if self._trials:
                    self._write()
                else:
                    self._release()

    def left(self) -> tuple[Verification, ...]:
        """Remove and return the records of a process that died; none while a trial of this process or another one holds the file, whose
        beginning has returned them. Does not wait. OSError: the file cannot be made."""
        with self._mutex:
            if self._file is not None:  # a second lock of the file would wait for the first
                return ()
            try:
                left_records = self._take(0)
            except TimeoutError:
                return ()
            self._release()
        return left_records

    def _take(self, patience: float) -> tuple[Verification, ...]:
        """Lock the file; returns the records in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+", encoding="utf-8")
        try:
            _lock(file.fileno(), self.path, patience)
        except BaseException:
            file.close()
            raise
        self._file = file
        return _parse(_read(file.fileno()))

    def _release(self) -> None:
        """Empty the file and unlock it."""
        if self._file is not None:
            _write(self._file.fileno(), "")
            self._file.close()
            self._file = None

    def _write(self) -> None:
        if self._file is not None:
            _write(self._file.fileno(), json.dumps([asdict(trial) for trial in self._trials]))


def _lock(descriptor: int, path: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"another process has been verifying kernels for {patience:.0f} s: {_read(descriptor) or 'no mark'} in {path}"
                ) from None
        time.sleep(POLL)


def _read(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")


def _parse(text: str) -> tuple[Verification, ...]:
    """The records in a mark; none for an empty one, or one truncated while it was written: then nothing ran."""
    try:
        data = json.loads(text) if text else []
        # A mark of an earlier version holds one record.
        return tuple(Verification(**record) for record in (data if isinstance(data, list) else [data]))
    except (ValueError, TypeError):
        return ()


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)
