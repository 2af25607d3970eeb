"""Native libraries of an installation, in ``gristmill/_lib``, and the functions in them that pack weights.

Code that only moves bytes is compiled for the lowest ISA level of an architecture and serves every CPU. Torch code beside each
caller does the same where an installation has no C++ library, and on other devices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gristmill

CPU_LIBRARY = "libgristmill_cpu.so"
_LOWEST_LEVELS = ("base", "neon")
"""Of x86-64 and others, and of AArch64."""


class NativeLibraryError(RuntimeError):
    """A native library, or a function in it, is not in this installation."""


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
def packing_function(name: str, argtypes: tuple[Any, ...]) -> Callable[..., None] | None:
    """The function ``name`` of the CPU library, None in an installation without it. It raises ValueError for arguments out of range."""
    path = library_dir() / CPU_LIBRARY
    library = load_library(path, "C++ kernels", "run `make build`") if path.is_file() else None
    entries = [f"{name}__{level}" for level in _LOWEST_LEVELS if hasattr(library, f"{name}__{level}")]
    if not entries:
        return None
    function = library[entries[0]]  # type: ignore[index]  # it has an entry
    function.argtypes, function.restype = argtypes, ctypes.c_int

    def call(*arguments: Any) -> None:
        code = function(*arguments)
        if code:
            raise ValueError(f"{name}: code {code}, from arguments {arguments}")

    return call
