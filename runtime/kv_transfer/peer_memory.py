"""Memory of another process, mapped into this one: CUDA IPC for a GPU, files without names for the host. Copies take addresses of both sides."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gristmill.runtime.kv_cache import host_memory

HANDLE = 64
"""Bytes of a handle of CUDA IPC."""
MOST_PITCH = (1 << 31) - 1
"""The most bytes between two rows of one copy on every GPU of CUDA."""
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


class PeerMemoryError(OSError):
    """Memory that cannot be shared, or what another process says about its memory and is not so. The message says what."""


class Copy(NamedTuple):
    """`rows` rows of `width` bytes between two addresses, each with the bytes from one row to the next."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE),)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = tuple(
        field
        for side in ("source", "target")
        for field in (
            (f"{side}_x", ctypes.c_size_t),
            (f"{side}_y", ctypes.c_size_t),
            (f"{side}_kind", ctypes.c_int),
            (f"{side}_host", ctypes.c_void_p),
            (side, ctypes.c_uint64),
            (f"{side}_array", ctypes.c_void_p),
            (f"{side}_pitch", ctypes.c_size_t),
        )
    ) + (("width", ctypes.c_size_t), ("rows", ctypes.c_size_t))


def call_driver(name: str, *arguments: Any) -> None:
    """Call the CUDA driver. PeerMemoryError: it refused, with the function and its error."""
    driver = ctypes.CDLL("libcuda.so.1")
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise PeerMemoryError(f"{name} failed: {(text.value or str(code).encode()).decode()}")


def export(tensor: Tensor) -> dict[str, Any]:
    """What another process of this host needs to map a contiguous tensor, as JSON.

    Raises:
        PeerMemoryError: its memory cannot be mapped by others.
    """
    if tensor.device.type == "cuda":
        return _export_device(tensor)
    descriptor = host_memory.descriptor_of(tensor)
    if tensor.device.type != "cpu" or descriptor is None:
        raise PeerMemoryError(
            f"memory of {tensor.device} that the engine did not allocate cannot be mapped by other processes"
        )
    return {"bytes": tensor.nbytes, "pid": os.getpid(), "file": descriptor}


def _export_device(tensor: Tensor) -> dict[str, Any]:
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = ctypes.c_uint64(tensor.data_ptr())
    with torch.cuda.device(tensor.device):
        _use_context()
    call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    try:
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
    except PeerMemoryError as error:
        raise PeerMemoryError(
            f"{error}: this memory has no handle for other processes, as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        ) from error
    return {
        "bytes": tensor.nbytes,
        "handle": bytes(memoryview(handle)).hex(),
        "offset": tensor.data_ptr() - int(base.value),
    }


def _use_context() -> None:
    """Make the context of the current device that of this thread, for calls of the driver: any call of CUDA's runtime does."""
    torch.cuda.current_stream().query()


class PeerMemory:
    """Memory that another process has exported, at `address` of this process, until `close`.

    Args:
        told: what `export` returned there, from JSON; nothing about it is trusted.
        device: that of this process which copies from there.

    Raises:
        PeerMemoryError: it is not there, not what it is said to be, or cannot be reached from here.
    """

    def __init__(self, told: Mapping[str, Any], device: torch.device) -> None:
        self.nbytes = _natural(told, "bytes")
        self._opened: int | None = None
        self._mapped: mmap.mmap | None = None
        if device.type == "cuda":
            self.address = self._open_device(told, device)
        else:
            self.address = self._open_file(told)

    def _open_device(self, told: Mapping[str, Any], device: torch.device) -> int:
        offset, text = _natural(told, "offset"), told.get("handle")
        try:
            handle = bytes.fromhex(text if isinstance(text, str) else "")
        except ValueError:
            handle = b""
        if len(handle) != HANDLE:
            raise PeerMemoryError(f"a handle has {HANDLE} bytes as hexadecimal text, got {text!r}")
        opened, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        with torch.cuda.device(device):
            _use_context()
            call_driver(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(opened),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(1),  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            )
            self._opened = int(opened.value)
            try:
                call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), opened)
                if offset + self.nbytes > size.value:
                    raise PeerMemoryError(
                        f"{self.nbytes} bytes at {offset} are said to be in an allocation of {size.value}"
                    )
            except PeerMemoryError:
                self.close()
                raise
        return int(opened.value) + offset

    def _open_file(self, told: Mapping[str, Any]) -> int:
        place = f"/proc/{_natural(told, 'pid')}/fd/{_natural(told, 'file')}"
        try:
            descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerMemoryError(f"the memory of another process cannot be opened: {error}") from error
        try:
            seals = 0
            with suppress(OSError):  # not a file of memory
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise PeerMemoryError(f"{place} is no memory that keeps its size")
            size = os.fstat(descriptor).st_size
            if not 0 < self.nbytes <= size:
                raise PeerMemoryError(f"{place} has {size} bytes, said to be {self.nbytes}")
            self._mapped = mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)
        return torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()

    def close(self) -> None:
        """Give the mapping back. No copy may be under way."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(opened))
        self._mapped = None


def copy_on_host(copies: Sequence[Copy]) -> None:
    """Copy between addresses of the host."""
    for copy in copies:
        for row in range(copy.rows):
            ctypes.memmove(
                copy.target + row * copy.target_pitch, copy.source + row * copy.source_pitch, copy.width
            )


def copy_on_stream(copies: Sequence[Copy], stream: torch.cuda.Stream) -> None:
    """Launch copies between addresses of GPUs, on a stream of the current device."""
    handle = ctypes.c_void_p(stream.cuda_stream)
    launch = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    for copy in copies:
        steps = [copy]
        if max(copy.target_pitch, copy.source_pitch) > MOST_PITCH:
            steps = [
                copy._replace(
                    target=copy.target + row * copy.target_pitch,
                    source=copy.source + row * copy.source_pitch,
                    target_pitch=copy.width,
                    source_pitch=copy.width,
                    rows=1,
                )
                for row in range(copy.rows)
            ]
        for one in steps:
            what = _Copy2D(
                source_kind=_DEVICE_MEMORY,
                source=one.source,
                source_pitch=one.source_pitch,
                target_kind=_DEVICE_MEMORY,
                target=one.target,
                target_pitch=one.target_pitch,
                width=one.width,
                rows=one.rows,
            )
            if code := launch(ctypes.byref(what), handle):
                raise PeerMemoryError(f"cuMemcpy2DAsync failed with CUresult {code}")


def _natural(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise PeerMemoryError(f"{name} must be a number of 0 or more, got {value!r}")
    return value
