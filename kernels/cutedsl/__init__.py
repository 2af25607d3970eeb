"""CuTe DSL: programs that are compiled on the user's machine for its device, when they are first needed.

A kernel in CuTe DSL is two files: a spec with its launcher, and a module of device code, which imports `cutlass` and which only the launcher
imports. That module has a function that builds a `Source`, a host function of CuTe DSL (`@cute.jit`) with placeholders for its arguments, for the
options of a configuration::

    def launch(config, call):
        from gristmill.kernels.activation._scale_rows_cutedsl import scale_rows

        program(scale_rows, config)(call.x, call.s, call.out)

The configuration has the architecture to compile for as ``arch`` (`Target.nvcc_arch`). A compiled program takes tensors and numbers and launches on
torch's current stream (TVM FFI), checks shapes, dtypes and alignments against the placeholders, and converts nothing.

Compiled programs are kept as object files in `folder`, under a hash of the sources of the module, the configuration and the versions of the
compiler. They are machine code: the folder is trusted as Triton's cache is. Nothing that CuTe DSL compiled is part of a distribution of gristmill.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.kernel_registry.kernel import Config, ConfigValue

PACKAGES = (("nvidia-cutlass-dsl", "4.8"), ("apache-tvm-ffi", "0.1.10"))
"""What a kernel requires: the compiler, and what its programs are called through."""
FOLDER_VARIABLE = "GRISTMILL_CUTEDSL_CACHE"
"""Names the folder of compiled programs, in this process and its children."""
ENTRY = "gristmill_program"
"""The function of an object file."""

Program = Callable[..., None]


class Source(NamedTuple):
    """What is compiled.

    Attributes:
        function: decorated with `cutlass.cute.jit`; its last parameter is the stream.
        arguments: placeholders (`cutlass.cute.runtime.make_fake_tensor`) and numbers for the others.
    """

    function: Any
    arguments: tuple[Any, ...]


Build = Callable[[Config], Source]
"""Builds the source of a configuration."""


@dataclass(frozen=True)
class CuteDslCase:
    """One compilation in the compile matrix, for the architecture that its configuration names.

    Attributes:
        build: ``"module:attr"`` of a `Build`; imported where it is compiled.
        promises: instructions that must appear in the machine code, as of `gristmill.kernels.aot.AotCase`.
    """

    name: str
    build: str
    config: Config
    promises: tuple[str, ...] = ()


_programs: dict[tuple[Any, ...], Program] = {}
_lock = threading.Lock()
listeners: list[Callable[[str, bool], None]] = []
"""Called with the name of each program that was compiled, or (True) found in the folder, for the first time in this process."""


def program(build: Build, config: Config) -> Program:
    """The program that `build` describes for a configuration: compiled by this process before, found in `folder`, or compiled now.

    Thread-safe. The launcher's hot path is one look-up.
    """
    key = (build, *config.values())
    found = _programs.get(key)
    return found if found is not None else _get(build, config, key)


def folder() -> Path:
    """Where compiled programs are kept."""
    from gristmill.kernel_registry.policy import default_cache

    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else default_cache() / "cutedsl"


def compile_program(source: Source, arch: str, *options: str) -> Any:
    """Compile for an architecture (``sm_90a``), on any machine. The result is callable, and can be exported."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    flags = " ".join((f"--gpu-arch {arch}", "--enable-tvm-ffi", *options))
    return cute.compile(source.function, *source.arguments, stream, options=flags)


def file_name(build: Build, config: Mapping[str, ConfigValue]) -> str:
    """The name of the object file of a program; it changes with the sources, the configuration and the compiler."""
    from gristmill.kernel_registry.closure import installed_sources

    code = installed_sources().code_hash((build.__module__,), {}, False)
    fields = (code, build.__qualname__, sorted(config.items()), _toolchain())
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32] + ".o"


@cache
def _toolchain() -> str:
    versions = (f"{name} {importlib.metadata.version(name)}" for name, _ in PACKAGES)
    return ", ".join((platform.machine(), *versions))


def _get(build: Build, config: Config, key: tuple[Any, ...]) -> Program:
    with _lock:
        if key in _programs:
            return _programs[key]
        path = folder() / file_name(build, config)
        made = _load(path)
        hit = made is not None
        if made is None:
            compiled = compile_program(build(config), str(config["arch"]))
            _keep(compiled, path)
            made = _load(path) or compiled  # as later processes have it
        for listener in listeners:
            listener(build.__qualname__, hit)
        _programs[key] = made
        return made


def _load(path: Path) -> Program | None:
    """The program of an object file; None without one, or if it is damaged, and is then written anew."""
    if not path.is_file():
        return None
    from cutlass.cute.runtime import load_module

    try:
        entry: Program = getattr(load_module(str(path), enable_tvm_ffi=True), ENTRY)
    except (AttributeError, OSError, RuntimeError):
        return None
    return entry


def _keep(compiled: Any, path: Path) -> None:
    """Write the object file under another name first, so that other processes never read a part of it. Without a folder that can be written,
    the next process compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as apart:
            written = Path(apart) / path.name
            compiled.export_to_c(str(written), ENTRY)
            written.replace(path)
    except OSError:
        return
