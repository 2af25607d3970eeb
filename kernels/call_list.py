"""Calls of native entries on CPUs, recorded once and made again without Python (`kernels/_native/call_list.cpp`).

    calls = CallList()
    with calls.recording():
        step()  # runs as ever; each native call of this thread is noted with the structs that it had
    calls.run(0, len(calls))  # the same calls, in one call from Python

A recorded call holds the addresses of its tensors: they must live as long as the list is run, and be written in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_int64, c_void_p
from functools import cache

from gristmill.kernels.native import check, cpu_library

CType = type[c_int] | type[c_int64] | type[c_void_p]
_THREAD = threading.local()


class UnrecordableError(Exception):
    """A step does what a record of its calls cannot repeat; says what."""


def is_recording() -> bool:
    """Whether this thread records its native calls."""
    return getattr(_THREAD, "recording", False)


class CallList:
    """The native calls of the blocks under `recording`, in their order. Raises NativeLibraryError if this installation has no library of
    C++ kernels."""

    def __init__(self) -> None:
        self._new = _function("gm_calls_new", c_void_p)
        self._record = _function("gm_calls_record", c_int, c_void_p)
        self._count = _function("gm_calls_count", c_int64, c_void_p)
        self._run = _function("gm_calls_run", c_int, c_void_p, c_int64, c_int64)
        self._free = _function("gm_calls_free", None, c_void_p)
        self._list = self._new()
        if not self._list:
            raise MemoryError("no memory for a list of native calls")

    def __del__(self) -> None:
        if getattr(self, "_list", None):
            self._free(self._list)

    def __len__(self) -> int:
        return int(self._count(self._list))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the native calls that this thread makes in the block, which must not be nested. MemoryError: the list could not hold them."""
        self._record(self._list)
        _THREAD.recording = True
        try:
            yield
        finally:
            _THREAD.recording = False
            code = self._record(None)
        check(code, "recording native calls")

    def run(self, begin: int, end: int) -> None:
        """Make the calls [begin, end) again. Raises the exception that the code of the first failing one stands for; none follows it."""
        code = self._run(self._list, begin, end)
        if code:
            check(code, "a recorded native call")


@cache
def _function(name: str, result: CType | None, *arguments: CType) -> Callable[..., int]:
    function = cpu_library()[name]
    function.restype, function.argtypes = result, arguments
    return function
