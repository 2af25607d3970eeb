"""Native libraries of an installation, in ``gristmill/_lib``, and the functions in them that pack weights.

Code that only moves bytes is compiled for the lowest ISA level of an architecture and serves every CPU. Torch code beside each
caller does the same where an installation has no C++ library, and on other devices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import gristmill
from gristmill.quant.argument_struct import ArgumentStruct, check_struct
from gristmill.quant.argument_struct import NativeLibraryError as NativeLibraryError

CPU_LIBRARY = "libgristmill_cpu.so"
_LOWEST_LEVELS = ("base", "neon")
"""Of x86-64 and others, and of AArch64."""


def library_dir() -> Path:
    """The folder of the native libraries; it need not exist."""
    return Path(str(gristmill.__file__)).parent / "_lib"


def load_library(path: Path, content: str, remedy: str) -> ctypes.CDLL:
    """A library whose threads are torch's. content and remedy: of the message if it is missing."""
    if not path.is_file():
        raise NativeLibraryError(f"gristmill was built without its {content}: {path} is missing; {remedy}")
    import torch  # noqa: F401  # loads libtorch_cpu.so: the library depends on it, but has no path to it

    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(f"cannot load {path}: {error}; rebuild it with `make build`") from error


@functools.cache
def packing_function(name: str, struct: ArgumentStruct) -> Callable[..., None] | None:
    """The function ``name`` of the CPU library, which takes all fields of its struct by name; None in an installation without it.

    Raises NativeLibraryError if it was compiled with another struct. The function raises ValueError for fields out of range.
    """
    path = library_dir() / CPU_LIBRARY
    library = load_library(path, "C++ kernels", "run `make build`") if path.is_file() else None
    entries = [f"{name}__{level}" for level in _LOWEST_LEVELS if hasattr(library, f"{name}__{level}")]
    if not entries:
        return None
    function = library[entries[0]]  # type: ignore[index]  # it has an entry
    check_struct(library, entries[0], struct)  # type: ignore[arg-type]
    function.argtypes, function.restype = (ctypes.POINTER(struct.new),), ctypes.c_int

    names = [field for _, field in struct.fields]

    def call(**fields: int | None) -> None:
        if fields.keys() != set(names):
            raise TypeError(f"{name} takes {', '.join(names)}, got {', '.join(fields)}")
        code = function(struct.new(**fields))
        if code:
            raise ValueError(f"{name}: code {code}, from {fields}")

    return call
