"""A mark on disk while a kernel is tried on an accelerator, so that a crash of the machine is attributed to it.

The verifying process locks the file, which holds the record of the kernel under trial. A lock ends with its process,
the content of a file does not: an unlocked mark was left by a process that died during a trial. Processes therefore verify
one after another, and none mistakes another's trial for a failure.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from gristmill.kernel_registry.renamed import migrated
from gristmill.kernel_registry.store import Verification

POLL = 0.05
"""Seconds between attempts to take a lock that another process holds."""


@contextmanager
def mark(path: Path, record: Verification, patience: float) -> Iterator[Verification | None]:
    """Hold the mark at `path` for a trial; yields the mark of a process that died, None where there was none.

    record: the record that the store gets if this process dies. patience: seconds to wait for other processes' trials.

    Raises:
        OSError: the file cannot be made. TimeoutError: another process holds it for longer than `patience`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        _lock(file.fileno(), path, patience)
        left_record = _parse(_read(file.fileno()))
        _write(file.fileno(), json.dumps(asdict(record)))
        try:
            yield left_record
        finally:
            # An exception is no crash; the caller handles it.
            _write(file.fileno(), "")


def _lock(descriptor: int, path: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"another process has been verifying kernels for {patience:.0f} s: {_read(descriptor) or 'no mark'} in {path}"
                ) from None
        time.sleep(POLL)


def _read(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")


def _parse(text: str) -> Verification | None:
    """The record in a mark; None for an empty one, or one truncated while it was written: then nothing ran."""
    try:
        return Verification(**migrated(json.loads(text))) if text else None
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)
