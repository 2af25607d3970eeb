"""Capture of CUDA graphs. All captures of the project go through this module.

Garbage collection is off during a capture: freeing an old graph would end it. After a capture that fails, random numbers and the
current stream are usable again. A lint rule forbids other captures.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph(graph, **options)` with the garbage collector disabled: collecting an unreferenced graph frees it, and
    freeing a graph invalidates the capture."""
    with _nothing_collected(), _restored(), torch.cuda.graph(graph, **options):  # noqa: TID251
        yield


@contextlib.contextmanager
def capturing_on(stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`capturing` on a stream, with options of `CUDAGraph.capture_begin`, for many captures in a row: neither synchronizes the device
    nor empties the caching allocator."""
    with _nothing_collected(), _restored(), torch.cuda.stream(stream):
        graph.capture_begin(**options)
        try:
            yield
        finally:
            graph.capture_end()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """After an error, make the stream of before current, and take torch's random generators out of the capture.

    torch (2.11) does neither when the end of a capture fails: every random number of the process would be refused afterwards.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        yield
    except BaseException:
        if stream is not None:
            torch.cuda.set_stream(stream)
            for generator in torch.cuda.default_generators:
                generator.graphsafe_set_state(generator.clone_state())
        raise
