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
        store = change(Store.read(path))
        _replace(path, dump(store))
    return store


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
