"""The native libraries in ``gristmill/_lib``: loaded lazily, called through ctypes.

The libraries have a plain C interface and no Python ABI. CPU entries are named ``<function>__<level>``, one per ISA
level (kernels/_native/gm_cpu.h); CUDA entries keep their name in a library per architecture (kernels/_native/gm_cuda.h).
An entry takes the struct of a call (`native_call`), or one that its launcher fills (`quant.argument_struct`)::

    args = ARGS.new(device=0, n=7)
    args.x = x.data_ptr()
    check(cuda_entry("gm_scale", ARGS)(args), "scale")

ctypes releases the interpreter lock during a call. An entry returns 0 or a negative code; `check` turns a code into an
exception.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from typing import Any

from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.target import Target
from gristmill.quant.argument_struct import ArgumentStruct, check_struct
from gristmill.quant.native import CPU_LIBRARY, NativeLibraryError, load_library
from gristmill.quant.native import library_dir as library_dir

#: For each CPU level, the levels whose code runs on it, best first.
LEVEL_CHAINS: dict[str, tuple[str, ...]] = {
    "base": ("base",),
    "avx2": ("avx2", "base"),
    "avx512": ("avx512", "avx2", "base"),
    "avx512_vnni": ("avx512_vnni", "avx512", "avx2", "base"),
    "avx512_bf16": ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "base"),
    "amx": ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "base"),
    "neon": ("neon",),
    "neon_dotprod": ("neon_dotprod", "neon"),
    "neon_i8mm": ("neon_i8mm", "neon_dotprod", "neon"),
    "sve": ("sve", "neon_i8mm", "neon_dotprod", "neon"),
    "vxe": ("vxe", "base"),
}

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    -1: (TypeError, "a dtype that this kernel was not built for"),
    -2: (ValueError, "a shape or stride out of its range"),
    -3: (MemoryError, "out of memory for its scratch space"),
    -4: (RuntimeError, "torch's thread pool failed"),
    -5: (ValueError, "an argument out of its range"),
    -6: (
        RuntimeError,
        "no CUDA driver that can load it: libcuda.so.1 of CUDA 12.0 or newer (r525) is needed",
    ),
}
_CUDA_ERROR = -1000  # codes from here down are this minus a CUresult


@functools.cache
def manifest() -> dict[str, Any]:
    """What the build contains: ``cpu_levels``, ``cuda``, ``compiler``, ``torch_target``, ``version``. Empty if not built."""
    path = library_dir() / "manifest.json"
    if not path.is_file():
        return {}
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@functools.cache
def cpu_library() -> ctypes.CDLL:
    """The library of C++ kernels. Raises NativeLibraryError if this installation has none."""
    return load_library(
        library_dir() / CPU_LIBRARY,
        "C++ kernels",
        "run `make build`, or install with a C++20 compiler present",
    )


@functools.cache
def cuda_library(arch: str) -> ctypes.CDLL:
    """The library of CUDA kernels for one architecture, ``sm_90a`` for example.

    Loading it needs no driver; calling into it does.
    """
    file = f"libgristmill_cuda_{arch.replace('_', '')}.so"
    return load_library(
        library_dir() / file, f"CUDA kernels for {arch}", "install with nvcc present and GRISTMILL_CUDA=on"
    )


@functools.cache
def cpu_function(name: str, level: str, argtypes: tuple[Any, ...]) -> Callable[..., int]:
    """The entry ``name`` at exactly ``level``, returning int. Calls cost about a microsecond.

    Raises ValueError for an unknown level and NativeLibraryError if the build has no such entry.
    """
    if level not in LEVEL_CHAINS:
        raise ValueError(f"unknown CPU level {level!r}; expected one of {', '.join(LEVEL_CHAINS)}")
    return _declare(cpu_library(), f"{name}__{level}", argtypes)


@functools.cache
def cuda_function(name: str, arch: str, argtypes: tuple[Any, ...]) -> Callable[..., int]:
    """The host entry ``name`` of the CUDA library for ``arch``, returning int."""
    return _declare(cuda_library(arch), name, argtypes)


@functools.cache
def cuda_entry(name: str, struct: ArgumentStruct) -> Callable[[ctypes.Structure], int]:
    """The host entry ``name`` of the library for sm_90a, which takes a struct. NativeLibraryError if it was compiled with another one."""
    function = cuda_function(name, "sm_90a", (ctypes.POINTER(struct.new),))
    check_struct(cuda_library("sm_90a"), name, struct)
    return function


def _declare(library: ctypes.CDLL, symbol: str, argtypes: tuple[Any, ...]) -> Callable[..., int]:
    try:
        # Indexing gives every caller its own function object, so argument types set here affect no other caller.
        function = library[symbol]
    except AttributeError:
        message = f"{library._name} has no function {symbol}; run `make build` after adding a source"
        raise NativeLibraryError(message) from None
    function.argtypes = argtypes
    function.restype = ctypes.c_int
    return function


@functools.cache
def best_level(name: str, level: str) -> str:
    """The highest level at or below ``level`` at which ``name`` was built.

    A kernel may skip levels that gain it nothing (``// gm-levels:`` in its source).
    """
    if level not in LEVEL_CHAINS:
        raise ValueError(f"unknown CPU level {level!r}; expected one of {', '.join(LEVEL_CHAINS)}")
    library = cpu_library()
    for candidate in LEVEL_CHAINS[level]:
        if hasattr(library, f"{name}__{candidate}"):
            return candidate
    raise NativeLibraryError(f"{library._name} has no variant of {name} at or below {level}")


def best_config(name: str) -> Callable[[Problem, Target], dict[str, str]]:
    """The `config` of a C++ kernel whose one choice is the code level: the best that `name` has for a CPU target."""

    def config(problem: Problem, target: Target) -> dict[str, str]:
        level = target.levels[0].partition(":")[2]  # not its name: features may have been taken away
        available = set(LEVEL_CHAINS[level]) & set(manifest().get("cpu_levels", ()))
        return {"level": best_level(name, level) if available else level}

    return config


def check(code: int, name: str) -> None:
    """Raise the exception that a native return code stands for; 0 passes."""
    if code == 0:
        return
    if code <= _CUDA_ERROR:
        raise RuntimeError(f"{name}: the CUDA driver answered error {_CUDA_ERROR - code}")
    kind, meaning = _ERRORS.get(code, (RuntimeError, f"unknown code {code}"))
    raise kind(f"{name}: {meaning}")
