"""Records in memory of the process that saved them, which other processes read through NIXL: over NVLink, RDMA, shared memory or TCP.

A folder that the processes share says who has what: a file per process with what NIXL needs to reach it, and one per record with its place.
Nothing is locked: a record that is overwritten while it is read has a wrong digest. Needs the package ``nixl``.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer import StoreSpec
from gristmill.runtime.kv_transfer.file import folder_and_capacity

SECONDS = 2.0
"""Time that one record may take. A process that does not give it counts as dead."""


class NixlStore:
    """Records in the memory of several processes, transferred by NIXL.

    Args:
        folder: where the processes meet; it must be theirs alone, because NIXL trusts what is in it.
        capacity: bytes of this process's records.

    Raises:
        UsageError: the package is missing, or the folder cannot be used.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self._name = uuid.uuid4().hex
        self._agent = make_agent(self._name, "the KV store nixl:FOLDER:SIZE", "file:FOLDER")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the KV store {folder} cannot be used: {error}") from error
        self.folder, self.capacity = folder, capacity
        self._lock = threading.Lock()  # of the agent, too
        self._memory = torch.zeros(capacity, dtype=torch.uint8)
        self._view = _bytes(self._memory)
        self._registered = [self._agent.register_memory(self._memory)]
        self._places: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # (offset, bytes), oldest first
        self._next = 0
        self._landing = torch.zeros(0, dtype=torch.uint8)
        self._peers: dict[str, bool] = {}  # whether it answers
        self._write(folder / f"{self._name}.agent", self._agent.get_agent_metadata())

    def matched(self, keys: Sequence[bytes]) -> list[bool]:
        """As `Store.matched`."""
        return [self._entry(key).is_file() for key in keys]

    def load(self, key: bytes, into: memoryview) -> int:
        """As `Store.load`."""
        try:
            name, address, size = json.loads(self._entry(key).read_bytes())
            valid = uuid.UUID(name).hex == name and type(address) is int and type(size) is int and size > 0
        except FileNotFoundError:
            return 0
        except (ValueError, TypeError, AttributeError):
            valid = False
        if not valid:
            self.drop(key)
            return 0
        if size > len(into):
            return int(size)
        with self._lock:
            if name == self._name:
                offset = address - self._memory.data_ptr()
                if self._places.get(key) != (offset, size):
                    return 0
                into[:size] = self._view[offset : offset + size]
                return int(size)
            if self._peers.get(name, True) and self._read(name, address, size):
                into[:size] = _bytes(self._landing)[:size]
                return int(size)
        self.drop(key)
        return 0

    def save(self, key: bytes, record: memoryview) -> None:
        """As `Store.save`."""
        size = len(record)
        if size > self.capacity:
            return
        with self._lock:
            if self._next + size > self.capacity:
                self._vacate(self._next, self.capacity)
                self._next = 0
            begin, self._next = self._next, self._next + size
            self._vacate(begin, self._next)
            self._view[begin : begin + size] = record
            self._places[key] = begin, size
            self._places.move_to_end(key)
        entry = json.dumps([self._name, self._memory.data_ptr() + begin, size])
        self._write(self._entry(key), entry.encode())

    def drop(self, key: bytes) -> None:
        """As `Store.drop`."""
        self._entry(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Withdraw this process and its records from the folder."""
        (self.folder / f"{self._name}.agent").unlink(missing_ok=True)
        with self._lock:
            for key in self._places:
                self.drop(key)
            self._places.clear()
            for memory in self._registered:
                self._agent.deregister_memory(memory)
            self._registered.clear()

    def _vacate(self, begin: int, end: int) -> None:
        """Drop the records in a part of the memory, which are the oldest ones: it is used in turn."""
        while self._places:
            oldest, (offset, length) = next(iter(self._places.items()))
            if offset >= end or offset + length <= begin:
                break
            del self._places[oldest]
            self.drop(oldest)

    def _read(self, name: str, address: int, size: int) -> bool:
        """Read memory of a peer to the front of the landing area; False if it does not answer."""
        agent = self._agent
        try:
            if name not in self._peers:
                self._peers[name] = False
                agent.add_remote_agent((self.folder / f"{name}.agent").read_bytes())
                self._peers[name] = True
            if len(self._landing) < size:
                self._landing = torch.zeros(size, dtype=torch.uint8)
                self._registered.append(agent.register_memory(self._landing))
            here = agent.get_xfer_descs(self._landing[:size])
            there = agent.get_xfer_descs([(address, size, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, name)
            agent.transfer(handle)
            state = state_at_end(agent, handle, SECONDS)
            if state == "PROC":  # it may still write there
                self._landing = torch.zeros(0, dtype=torch.uint8)
            agent.release_xfer_handle(handle)
            self._peers[name] = state == "DONE"
        except agent_errors():
            self._peers[name] = False
        return self._peers[name]

    def _entry(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.at"

    def _write(self, place: Path, data: bytes) -> None:
        """A file that readers see whole, or not at all."""
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, place)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def make_agent(name: str, user: str, instead: str) -> Any:
    """An agent of NIXL. UsageError, with who uses it and what can be used instead: the package is missing."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise UsageError(f"{user} needs NIXL: pip install nixl, or use {instead} ({error})") from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to the standard output
    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return nixl_agent(name, nixl_agent_config(backends=["UCX"], sync_mode=strict))


def state_at_end(agent: Any, handle: Any, seconds: float) -> str:
    """The state of a transfer that was begun, once it has ended; ``PROC`` if it has not after so many seconds."""
    until = time.monotonic() + seconds
    while (state := str(agent.check_xfer_state(handle))) == "PROC" and time.monotonic() < until:
        time.sleep(0)
    return state


def agent_errors() -> tuple[type[Exception], ...]:
    """What a peer that has ended may raise: exceptions of NIXL, which have no common base, and its missing file."""
    from nixl import _bindings

    found = (one for one in vars(_bindings).values() if isinstance(one, type) and issubclass(one, Exception))
    return FileNotFoundError, *found


def _bytes(tensor: torch.Tensor) -> memoryview:
    memory: Any = tensor.numpy()
    return memoryview(memory)


def open_store(argument: str) -> NixlStore:
    """From ``FOLDER:SIZE``."""
    where = "the store 'nixl:FOLDER:SIZE'"
    folder, capacity = folder_and_capacity(argument, where)
    if capacity is None:
        raise UsageError(f"{where}: the size is missing")
    return NixlStore(Path(folder), capacity)


STORE = StoreSpec(
    name="nixl",
    summary="nixl:FOLDER:SIZE, memory of each process that others read through NIXL",
    open=open_store,
)
