"""The clock of every measurement, and detection of tampering.

References to the clock are taken when this module is imported, before the code of any kernel. A kernel that replaces a timer
changes nothing here, and `tampered` names what it replaced.
"""

from __future__ import annotations

import sys
import time
from typing import Any

now = time.perf_counter
"""Seconds, from the monotonic clock with the finest steps."""

_HOST = tuple(
    (time, name, getattr(time, name))
    for name in (
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "time",
        "time_ns",
        "process_time",
        "sleep",
    )
)
_TORCH = (
    "Event.record",
    "Event.elapsed_time",
    "Event.synchronize",
    "Stream.synchronize",
    "synchronize",
    "CUDAGraph.replay",
)


def _torch_functions() -> tuple[tuple[Any, str, Any], ...]:
    import torch

    functions = []
    for path in _TORCH:
        owner: Any = torch.cuda
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        functions.append((owner, name, getattr(owner, name)))
    return tuple(functions)


def originals() -> tuple[tuple[Any, str, Any], ...]:
    """Every function that a measurement relies on: (owner, name, function), as they are now."""
    this_module = sys.modules[__name__]
    return (*_HOST, *_torch_functions(), (this_module, "now", now), (this_module, "tampered", tampered))


def tampered(before: tuple[tuple[Any, str, Any], ...]) -> str:
    """Names of functions that are no longer what they were when `originals` was called, "" if all are."""
    changed = [
        f"{getattr(owner, '__qualname__', None) or owner.__name__}.{name}"
        for owner, name, function in before
        if getattr(owner, name, None) is not function
    ]
    return ", ".join(changed)
