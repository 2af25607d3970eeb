"""Capture of CUDA graphs. All captures of the project go through this module."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph(graph, **options)`, during which nothing is collected: an old graph among the garbage, an engine's that was
    dropped, say, would be freed by whichever allocation comes next, and freeing a graph invalidates the capture."""
    with _nothing_collected(), torch.cuda.graph(graph, **options):  # noqa: TID251
        yield


@contextlib.contextmanager
def capturing_on(stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`capturing` on a stream, with options of `CUDAGraph.capture_begin`, for many captures in a row: neither waits for the device nor gives
    torch's free memory back to it, which would be allocated again for the next one."""
    with _nothing_collected(), torch.cuda.stream(stream):
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
