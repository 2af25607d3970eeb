"""Records as files of a folder, which any number of processes may use at once, and later ones.

A record is written next to its place and moved there, so readers see whole files. A process that saves beyond the capacity removes the files that
were used least recently, by their time of modification, which a load renews.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer import StoreSpec, parse_bytes

SUFFIX, PART = ".kv", ".part"
ABANDONED = 3600.0
"""Seconds after which a record that is still being written belongs to a process that has ended."""
FREED = 0.9
"""What remains of the capacity after files were removed: the folder is not listed for every record."""


class FileStore:
    """Records as files of a folder, which is made if it is missing. `capacity` is the bytes of all records; None = no limit.

    Raises:
        UsageError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, capacity: int | None) -> None:
        self.folder, self.capacity = folder, capacity
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_unfinished()
            self._nbytes = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise UsageError(f"the KV store {folder} cannot be used: {error}") from error
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise UsageError(f"the KV store {folder} cannot be used: it is not readable and writable")

    def matched(self, keys: Sequence[bytes]) -> list[bool]:
        """As `Store.matched`."""
        return [self._place(key).is_file() for key in keys]

    def load(self, key: bytes, into: memoryview) -> int:
        """As `Store.load`."""
        place = self._place(key)
        try:
            with open(place, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > len(into):
                    return size
                read = 0
                while read < size and (count := file.readinto(into[read:size])):
                    read += count
        except FileNotFoundError:
            return 0
        with suppress(OSError):  # removed meanwhile, or of another user
            os.utime(place)
        return read

    def save(self, key: bytes, record: memoryview) -> None:
        """As `Store.save`."""
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=PART)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                written = 0
                while written < len(record):
                    written += file.write(record[written:])
            os.replace(temporary, self._place(key))
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        with self._lock:
            self._nbytes += len(record)
            if self.capacity is not None and self._nbytes > self.capacity:
                self._remove_oldest(self.capacity)

    def drop(self, key: bytes) -> None:
        """As `Store.drop`."""
        self._place(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing: the files are for others, too."""

    def _place(self, key: bytes) -> Path:
        return self.folder / (key.hex() + SUFFIX)

    def _files(self) -> list[tuple[float, int, str]]:
        """(time, bytes, path) of all records."""
        files = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):  # another process has removed it
                    status = entry.stat()
                    files.append((status.st_mtime, status.st_size, entry.path))
        return files

    def _remove_unfinished(self) -> None:
        """Remove what processes that were killed have left next to the records."""
        for entry in os.scandir(self.folder):
            if entry.name.endswith(PART):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > ABANDONED:
                        os.unlink(entry.path)

    def _remove_oldest(self, capacity: int) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= FREED * capacity:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        self._nbytes = total


def folder_and_capacity(argument: str, where: str) -> tuple[str, int | None]:
    """From ``NAME[:SIZE]``; UsageError, with `where`, without a name."""
    name, _, size = argument.rpartition(":")
    if not name:
        name, size = size, ""
    if not name:
        raise UsageError(f"{where}: the name is missing")
    return name, parse_bytes(size, where) if size else None


def open_store(argument: str) -> FileStore:
    """From ``FOLDER[:SIZE]``."""
    folder, capacity = folder_and_capacity(argument, "the store 'file:FOLDER[:SIZE]'")
    return FileStore(Path(folder), capacity)


STORE = StoreSpec(
    name="file", summary="file:FOLDER[:SIZE], files that several processes may share", open=open_store
)
