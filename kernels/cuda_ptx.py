"""The native library of PTX, which the driver compiles for any GPU from sm_80 on (cmake/cuda_ptx.cmake). `native` has that for Hopper."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from gristmill.kernels.native import cuda_function, cuda_library
from gristmill.quant.argument_struct import ArgumentStruct, check_struct

ARCH = "compute_80"
"""What it is compiled for, as build manifests and `Requirement.code` name it."""


@functools.cache
def ptx_entry(name: str, struct: ArgumentStruct) -> Callable[[ctypes.Structure], int]:
    """The host entry ``name``, which takes a struct. NativeLibraryError if it was compiled with another one."""
    function = cuda_function(name, ARCH, (ctypes.POINTER(struct.new),))
    check_struct(cuda_library(ARCH), name, struct)
    return function
