"""Capture of CUDA graphs. All captures of the project go through this module.

Garbage collection is off during a capture: freeing an old graph would end it. After a capture that fails, random numbers and the
current stream are usable again. A lint rule forbids other captures.

What a kernel does once, when it first runs (it is compiled or loaded, or looks something up on the device), must not become part of a
capture. `only_what_has_run` refuses kernels that would do it there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from gristmill._garbage import nothing_collected

_THREAD = threading.local()


@contextlib.contextmanager
def only_what_has_run() -> Iterator[None]:
    """In the block, this thread captures no kernel of a plan in a bucket that has not run yet, outside of captures: `UnpreparedError`."""
    _THREAD.refuses_first_runs = True
    try:
        yield
    finally:
        _THREAD.refuses_first_runs = False


def refuses_first_runs() -> bool:
    """Whether this thread is in a block of `only_what_has_run`."""
    return getattr(_THREAD, "refuses_first_runs", False)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph(graph, **options)` with the garbage collector disabled: collecting an unreferenced graph frees it, and
    freeing a graph invalidates the capture."""
    with nothing_collected(), _restored(), torch.cuda.graph(graph, **options):  # noqa: TID251
        yield


@contextlib.contextmanager
def capturing_on(stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`capturing` on a stream, with options of `CUDAGraph.capture_begin`, for many captures in a row: neither synchronizes the device
    nor empties the caching allocator."""
    with nothing_collected(), _restored(), torch.cuda.stream(stream):
        graph.capture_begin(**options)
        try:
            yield
        finally:
            graph.capture_end()


class Pieces:
    """Graphs of what a stream launches, one after the other.

    Attributes:
        graphs: those so far; the last one is being captured until `end`.
    """

    def __init__(self, **options: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._options = options
        self._is_open = False
        self._begin()

    def cut(self) -> None:
        """End a graph and begin the next one."""
        self.end()
        self._begin()

    def end(self) -> None:
        """End the last graph, unless it has ended, as one has whose end failed."""
        if self._is_open:
            self._is_open = False
            self.graphs[-1].capture_end()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(**self._options)
        self.graphs.append(graph)
        self._is_open = True


@contextlib.contextmanager
def capturing_pieces(stream: torch.cuda.Stream, **options: Any) -> Iterator[Pieces]:
    """As `capturing_on`, in graphs that end where the block says so (`Pieces.cut`)."""
    with nothing_collected(), _restored(), torch.cuda.stream(stream):
        pieces = Pieces(**options)
        try:
            yield pieces
        finally:
            pieces.end()


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
