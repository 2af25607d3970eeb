"""The native libraries of PTX for other architectures than `cuda_ptx`'s (cmake/cuda_ptx.cmake)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from gristmill.kernels.native import cuda_function, cuda_library
from gristmill.quant.argument_struct import ArgumentStruct, check_struct


@functools.cache
def ptx_entry_of(name: str, struct: ArgumentStruct, arch: str) -> Callable[[ctypes.Structure], int]:
    """The host entry ``name``, which takes a struct, of the library for ``arch``, ``compute_89`` for example.

    Raises:
        NativeLibraryError: this build has no such library or entry, or compiled it with another struct.
    """
    function = cuda_function(name, arch, (ctypes.POINTER(struct.new),))
    check_struct(cuda_library(arch), name, struct)
    return function
