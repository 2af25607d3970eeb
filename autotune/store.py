"""The writer of the store: records are appended under a lock, and the file is replaced atomically."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gristmill.kernel_registry.store import SCHEMA, Store, Timing, Verification


def save(path: Path, records: Iterable[Verification | Timing]) -> Store:
    """Merge `records` into the store at `path`, and return what it then holds.

    Safe among processes: read, merge and replace happen under a lock on ``<path>.lock``; readers see the old file or
    the new one. StoreError if the present file is damaged: it is left as it is.
    """

    def change(store: Store) -> Store:
        for record in records:
            store.add(record)
        return store

    return update(path, change)


def update(path: Path, change: Callable[[Store], Store]) -> Store:
    """Replace the store at `path` by what `change` makes of it, under the lock, and return it. StoreError as for `save`.

    What a link points to is replaced, not the link; and who may read the file stays as it is.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(path.name + ".lock")):
        store = change(present(path))
        _replace(path, dump(store))
        _remember(path, store)
    return store


def present(path: Path) -> Store:
    """The store at `path`, as `Store.read`: one of its own, not read again if this process wrote the file and nobody has replaced it since."""
    path = path.resolve()
    state, known = state_of(path), _written
    if known is None or known[:2] != (path, state):
        return Store.read(path)
    return known[2].copy()


def state_of(path: Path) -> tuple[int, int, int] | None:
    """What differs between two states of a file, which is always replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


_written: tuple[Path, tuple[int, int, int] | None, Store] | None = None
"""The file that this process wrote last, its state then, and what it held."""


def _remember(path: Path, store: Store) -> None:
    global _written
    _written = path, state_of(path), store.copy()


def dump(store: Store) -> str:
    """A store as JSON: one record a line, sorted, so that files diff well."""
    lines = {
        "verified": sorted(json.dumps(vars(v), sort_keys=True) for v in store.verifications.values()),
        "timed": sorted(json.dumps(_fields(t), sort_keys=True) for t in store.timings),
    }
    parts = [f'"{name}": [\n' + ",\n".join(rows) + "\n]" for name, rows in lines.items()]
    return f'{{"schema": {SCHEMA},\n' + ",\n".join(parts) + "}\n"


def _fields(timing: Timing) -> dict[str, object]:
    """What is written of a time; few have an origin."""
    fields = vars(timing)
    return fields if timing.origin else {name: value for name, value in fields.items() if name != "origin"}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # the lock is held: nobody else has this name
    try:
        temporary.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
