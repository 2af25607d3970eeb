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
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):  # noqa: TID251
            yield
    finally:
        if enabled:
            gc.enable()
