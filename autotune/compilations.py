"""What Triton and CuTe DSL compile in this process, and what they find compiled; and where they keep it.

Triton keeps compiled code in files that it finds by a hash of source, options, target and its own version, as JSON and machine code. They name
each other by absolute paths, so a cache is used in the folder in which it was filled.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from gristmill.kernel_registry.policy import Policy
from gristmill.kernels import cutedsl

CACHE_VARIABLE = "TRITON_CACHE_DIR"
"""Triton's own variable for the folder of its cache."""


class Compilations(NamedTuple):
    """Kernels that were compiled, and that were found compiled."""

    compiled: int
    reused: int


class _Watch(threading.local):
    """The names of the kernels that this thread had compiled or loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []


_LOCK = threading.Lock()
_WATCH = _Watch()
_total = Compilations(0, 0)


def total() -> Compilations:
    """Those of this process since the first kernel of such a language was loaded by a plan."""
    return _total


def of_this_thread() -> int:
    """The number of those of this thread."""
    return len(_WATCH.names)


def names_since(count: int) -> list[str]:
    """The kernels that this thread had compiled or loaded since `of_this_thread` was `count`."""
    return _WATCH.names[count:]


def watch(language: str) -> None:
    """Count what is compiled of a language from now on. A listener that the program has set for Triton, which is imported, goes on."""
    if language == "triton":
        _watch_triton()
    elif language == "cutedsl" and _count not in cutedsl.listeners:
        cutedsl.listeners.append(_count)


def _count(name: str, hit: bool) -> None:
    """One kernel: compiled, or found."""
    global _total
    with _LOCK:
        _total = Compilations(_total.compiled + (not hit), _total.reused + hit)
    _WATCH.names.append(name)


def _watch_triton() -> None:
    from triton import knobs

    listener = getattr(knobs.compilation, "listener", None)
    if isinstance(listener, _Listener):
        return
    with _LOCK:
        knobs.compilation.listener = _Listener(listener)


class _Listener:
    """Triton calls it when a kernel is compiled, or found in the cache, for the first time in this process."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def __call__(self, **event: Any) -> None:
        _count(str(event["metadata"].get("name", "a kernel")), bool(event["cache_hit"]))
        if self.other is not None:
            self.other(**event)


def prepare_triton(device: bool = True) -> None:
    """Do what Triton does once in a process before its first kernel, and remembers: it is imported, hashes all its files (0.4 GB, which takes 0.5 s
    and more), and with a device asks its assembler for its version. Nothing fails where it is not installed, or does it otherwise.

    Args:
        device: whether the current device may be used.
    """
    with suppress(ImportError, AttributeError, OSError, RuntimeError, subprocess.CalledProcessError):
        from triton.compiler import make_backend
        from triton.runtime import cache, driver

        cache.triton_key()
        if device:
            make_backend(driver.active.get_current_target()).hash()


def keep_below(policy: Policy) -> None:
    """Let Triton and CuTe DSL keep compiled code in ``triton`` and ``cutedsl`` below the cache of a policy that names one, in this process and its
    children, unless their variables name other folders: then one folder has everything that a warm-up makes."""
    if policy.cache is None:
        return
    for variable, name in ((CACHE_VARIABLE, "triton"), (cutedsl.FOLDER_VARIABLE, "cutedsl")):
        if variable not in os.environ:
            os.environ[variable] = str(policy.cache_path.absolute() / name)
