"""What Triton compiles in this process, and what it finds compiled in its cache; and the place of that cache.

Triton keeps compiled code in files that it finds by a hash of source, options, target and its own version, as JSON and machine code. They name
each other by absolute paths, so a cache is used in the folder in which it was filled.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

from gristmill.kernel_registry.policy import Policy

CACHE_VARIABLE = "TRITON_CACHE_DIR"
"""Triton's own variable for the folder of its cache."""


class Compilations(NamedTuple):
    """Kernels that Triton compiled, and that it found in its cache."""

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
    """Those of this process since the first Triton kernel was loaded by a plan."""
    return _total


def of_this_thread() -> int:
    """The number of those of this thread."""
    return len(_WATCH.names)


def names_since(count: int) -> list[str]:
    """The kernels that this thread had compiled or loaded since `of_this_thread` was `count`."""
    return _WATCH.names[count:]


def watch() -> None:
    """Count from now on; a listener that the program has set goes on. Triton is imported."""
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
        global _total
        hit = bool(event["cache_hit"])
        with _LOCK:
            _total = Compilations(_total.compiled + (not hit), _total.reused + hit)
        _WATCH.names.append(str(event["metadata"].get("name", "a kernel")))
        if self.other is not None:
            self.other(**event)


def keep_below(policy: Policy) -> None:
    """Let Triton keep compiled code in ``triton`` below the cache of a policy that names one, in this process and its children, unless
    TRITON_CACHE_DIR says another folder: then one folder has everything that a warm-up makes."""
    if policy.cache is not None and CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = str(policy.cache_path.absolute() / "triton")
