"""Pauses of Python's garbage collection, which a serving process cannot afford."""

from __future__ import annotations

import gc
import weakref


def freeze_heap(owner: object) -> None:
    """Collect garbage; then later collections leave out every object that is alive now, until `owner` is gone.

    A full collection visits each object of the process. With torch and Triton imported these are hundreds of thousands, most of which
    are never freed; beside a GPU that was 0.2 to 0.6 s, in which no step was launched. Cycles among frozen objects are not freed, so
    `owner` must not be part of one: it must go with its last reference.
    """
    gc.collect()
    gc.freeze()
    weakref.finalize(owner, gc.unfreeze).atexit = False
