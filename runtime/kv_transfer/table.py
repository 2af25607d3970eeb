"""What blocks a process has, in a file of memory that other processes map: for each block of its cache a key, a digest, and whether it was read.

The owner holds a lock on the file as long as it lives, which the system gives back however it ends. It alone writes keys and digests;
a reader writes only that it has read a block. Nothing that a reader finds is trusted: what it copies has to have the digest, and without it the
tokens are computed.

    head        magic, then the length of a description, then that as JSON: where the memory is and how blocks lie in it
    version     odd while keys and digests change
    keys        32 bytes for each block; zero = none that others may read
    digests     64 bits for each
    read        a byte for each: set by readers, cleared by the owner
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.runtime.kv_transfer.peer_memory import PeerMemoryError

MAGIC = b"gmkvtab\1"
SUFFIX, PART = ".table", ".part"
HEAD = 1 << 20
"""Bytes before the version, which the description has to fit in."""
KEY = 32
MOST_BLOCKS = 1 << 26
ATTEMPTS = 100
"""Times that a table is read while its owner changes it, a millisecond apart."""


class _Columns:
    """The parts of a mapped table as arrays."""

    def __init__(self, memory: mmap.mmap, blocks: int) -> None:
        place = HEAD
        self.version: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, 1, place)
        self.keys: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, 4 * blocks, place + 64).reshape(
            -1, 4
        )
        place += 64 + KEY * blocks
        self.digests: NDArray[np.int64] = np.frombuffer(memory, np.int64, blocks, place)
        self.read: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, blocks, place + 8 * blocks)


def _size(blocks: int) -> int:
    return HEAD + 64 + (KEY + 8 + 1) * blocks


class OwnTable:
    """The table of this process, in a folder that only processes of its user may write. Any thread may call it.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, blocks: int) -> None:
        self.name = uuid.uuid4().hex
        self._path = folder / f"{self.name}{SUFFIX}"
        self._lock = threading.Lock()
        part = folder / f"{self.name}{PART}"
        self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._file, 0, _size(blocks))
            self._memory = mmap.mmap(self._file, _size(blocks))
            self._memory[: len(MAGIC)] = MAGIC
            os.replace(part, self._path)
        except BaseException:
            os.close(self._file)
            part.unlink(missing_ok=True)
            raise
        self._columns = _Columns(self._memory, blocks)
        self._published = np.zeros(blocks, bool)

    def describe(self, description: Mapping[str, Any]) -> None:
        """Say where the memory is now. ValueError: too long a description."""
        text = json.dumps(description).encode()
        if len(text) > HEAD - 16:
            raise ValueError(f"a description of {len(text)} bytes does not fit into {HEAD - 16}")
        with self._changes():
            self._memory[8:16] = struct.pack("<Q", len(text))
            self._memory[16 : 16 + len(text)] = text

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], digests: NDArray[np.int64]) -> None:
        """Let others read blocks."""
        places = np.asarray(blocks, np.int64)
        with self._changes():
            self._columns.keys[places] = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
            self._columns.digests[places] = digests
            self._columns.read[places] = 0
            self._published[places] = True

    def withdraw(self, blocks: Iterable[int]) -> None:
        """These blocks, if others may read them, are overwritten from now on."""
        chosen = [block for block in blocks if self._published[block]]
        if chosen:
            with self._changes():
                self._columns.keys[chosen] = 0
                self._published[chosen] = False

    def clear(self) -> None:
        """Let nobody read anything."""
        with self._changes():
            self._columns.keys[:] = 0
            self._published[:] = False

    def were_read(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each block whether a reader has said so since it was published."""
        return self._columns.read[blocks].astype(bool)

    def close(self) -> None:
        """Remove the file."""
        self.clear()
        self._path.unlink(missing_ok=True)
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping has the same lock
        os.close(self._file)

    @contextmanager
    def _changes(self) -> Iterator[None]:
        with self._lock:
            self._columns.version += np.uint64(1)
            try:
                yield
            finally:
                self._columns.version += np.uint64(1)


class PeerTable:
    """The table of another process. One thread uses it.

    Attributes:
        name: of its file.
        description: as the owner has given it, when `refresh` was called last.

    Raises:
        PeerMemoryError: it is no table. FileNotFoundError: it was removed.
    """

    def __init__(self, path: Path) -> None:
        self.name, self._path = path.stem, path
        self.description: dict[str, Any] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(self._file).st_size
            blocks = (size - _size(0)) // (KEY + 9)
            if not 0 < blocks <= MOST_BLOCKS or _size(blocks) != size:
                raise PeerMemoryError(f"{path} has {size} bytes, which is no table of blocks")
            self._memory = mmap.mmap(self._file, size)
            if self._memory[: len(MAGIC)] != MAGIC:
                raise PeerMemoryError(f"{path} is no table of this version of gristmill")
        except BaseException:
            os.close(self._file)
            raise
        self.blocks = blocks
        self._columns = _Columns(self._memory, blocks)
        self._version = -1
        self._sorted = np.zeros(0, np.uint64)
        self._order = np.zeros(0, np.int64)
        self._keys, self._digests = self._columns.keys[:0], self._columns.digests[:0]

    def alive(self) -> bool:
        """Whether the owner lives; if not, its file is removed."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._path.unlink(missing_ok=True)
        return False

    def refresh(self) -> None:
        """Read what has changed. PeerMemoryError: it changes all the time, or the description is damaged."""
        for _ in range(ATTEMPTS):
            version = int(self._columns.version[0])
            if version == self._version:
                return
            if version % 2 == 0:
                text = self._description()
                keys, digests = self._columns.keys.copy(), self._columns.digests.copy()
                if int(self._columns.version[0]) == version:
                    self._index(version, text, keys, digests)
                    return
            time.sleep(0.001)
        raise PeerMemoryError(f"{self._path} changes all the time")

    def find(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """The block of each key, -1 = none, as of `refresh`."""
        wanted = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
        found = np.full(len(wanted), -1, np.int64)
        if len(self._sorted):
            near = np.searchsorted(self._sorted, wanted[:, 0]).clip(max=len(self._sorted) - 1)
            blocks = self._order[near]
            same = (self._keys[blocks] == wanted).all(1)
            found[same] = blocks[same]
        return found

    def digests(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The digests of blocks that `find` returned."""
        return self._digests[blocks]

    def acknowledge(self, blocks: NDArray[np.int64]) -> None:
        """Tell the owner that blocks were read."""
        self._columns.read[blocks] = 1

    def close(self) -> None:
        """Give the file back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _description(self) -> bytes:
        (length,) = struct.unpack("<Q", self._memory[8:16])
        return self._memory[16 : 16 + length] if length <= HEAD - 16 else b"?"

    def _index(self, version: int, text: bytes, keys: NDArray[np.uint64], digests: NDArray[np.int64]) -> None:
        try:
            description = json.loads(text) if text else {}
        except ValueError:
            description = None
        if not isinstance(description, dict):
            raise PeerMemoryError(f"{self._path} has a damaged description")
        order = np.argsort(keys[:, 0], kind="stable")
        order = order[keys[order].any(1)]
        self._version, self.description = version, description
        self._order, self._sorted = order, keys[order, 0]
        self._keys, self._digests = keys, digests
