"""The library of HIP kernels, ``_lib/libgristmill_hip.so``: loaded lazily, called through ctypes.

It needs neither ROCm nor an AMD GPU to load; a call finds the HIP runtime that torch has loaded (kernels/_native/gm_hip.h).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from gristmill.quant.argument_struct import ArgumentStruct, check_struct
from gristmill.quant.native import NativeLibraryError, library_dir, load_library

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = "libgristmill_hip.so"
_ERRORS: dict[int, tuple[type[Exception], str]] = {
    -1: (TypeError, "a dtype that this kernel was not built for"),
    -2: (ValueError, "a shape or stride out of its range"),
    -5: (ValueError, "an argument out of its range"),
    -6: (RuntimeError, "no HIP runtime: libamdhip64.so of ROCm 5 or newer is needed"),
    -8: (
        RuntimeError,
        "the library has no code object for this device; `kernelbench doctor` lists those it has",
    ),
}
_HIP_ERROR = -1000  # codes from here down are this minus a hipError_t


@functools.cache
def hip_library() -> ctypes.CDLL:
    """The library. NativeLibraryError if this installation has none."""
    remedy = "install with clang (with its AMDGPU target) and lld present, and GRISTMILL_HIP=on"
    return load_library(library_dir() / LIBRARY, "HIP kernels", remedy)


@functools.cache
def hip_function(name: str, argtypes: tuple[type, ...]) -> Callable[..., int]:
    """The host entry ``name``, returning int. NativeLibraryError if the build has none."""
    library = hip_library()
    try:
        entry = library[name]
    except AttributeError:
        message = f"{library._name} has no function {name}; run `make build` after adding a source"
        raise NativeLibraryError(message) from None
    entry.argtypes, entry.restype = argtypes, ctypes.c_int
    return entry


@functools.cache
def hip_entry(name: str, struct: ArgumentStruct) -> Callable[[ctypes.Structure], int]:
    """The entry that takes a struct. NativeLibraryError if it was compiled with another one."""
    function = hip_function(name, (ctypes.POINTER(struct.new),))
    check_struct(hip_library(), name, struct)
    return function


def current_stream(x: Tensor) -> int:
    """The hipStream_t that torch uses now on the device of `x`."""
    import torch

    return int(torch.cuda.current_stream(x.get_device()).cuda_stream)


def check(code: int, name: str) -> None:
    """Raise the exception that a return code stands for; 0 passes."""
    if code == 0:
        return
    if code <= _HIP_ERROR:
        raise RuntimeError(f"{name}: the HIP runtime answered error {_HIP_ERROR - code}")
    kind, meaning = _ERRORS.get(code, (RuntimeError, f"unknown code {code}"))
    raise kind(f"{name}: {meaning}")
