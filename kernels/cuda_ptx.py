"""The native libraries of PTX, which the driver compiles for any GPU from an architecture on (cmake/cuda_ptx.cmake). `native` has
Hopper's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from gristmill.kernels.native import cuda_function, cuda_library
from gristmill.quant.argument_struct import ArgumentStruct, check_struct

ARCH = "compute_80"
"""What the library of most sources is compiled for, as build manifests and `Requirement.code` name it."""


@functools.cache
def ptx_entry(name: str, struct: ArgumentStruct, arch: str = ARCH) -> Callable[[ctypes.Structure], int]:
    """The host entry ``name``, which takes a struct, of the library for ``arch``, ``compute_89`` for example.

    Raises:
        NativeLibraryError: this build has no such library or entry, or compiled it with another struct.
    """
    function = cuda_function(name, arch, (ctypes.POINTER(struct.new),))
    check_struct(cuda_library(arch), name, struct)
    return function
