"""Turns on a GPU that several pytest processes share (`pytest -n`): most tests run concurrently, timing tests
run alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Lock held by any number of processes at once, or by one process alone.

    The locks are files in `folder`; the system releases those of a dead process.
    """
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # while a process waits to be alone, no other one enters
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
