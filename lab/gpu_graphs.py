"""Calls on one GPU as CUDA graphs that are replayed in turn, and the read floor: shared by the programs of `lab` that time launchers
directly, over many copies of a weight.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.reading import reading

DEVICE = "cuda:0"
COLD = 260 << 20
"""Total bytes of the copies of a weight: four times the L2 of an H200."""

Call = Callable[[], Any]


class Graphs:
    """Candidates of one problem, each a CUDA graph of calls, replayed in turn."""

    def __init__(self) -> None:
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Sequence[Call]]] = {}

    def add(self, name: str, calls: Sequence[Call]) -> None:
        """Capture a graph of these calls, in order. The first one also runs before the capture, which compiles and loads its kernels.

        The calls live as long as the graph, which writes to their workspaces: capturing another graph empties torch's cache.
        """
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            for call in calls:
                call()
        graph.replay()
        self.graphs[name] = (graph, calls)

    def settle(self, seconds: float) -> None:
        """Replay everything for some seconds, so that clocks and power reach their sustained values."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            self.samples(1)

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds per call, by name: one sample per round. Each round starts with the next candidate."""
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        names = list(self.graphs)
        for first in range(rounds):
            for name in names[first % len(names) :] + names[: first % len(names)]:
                graph, calls = self.graphs[name]
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                graph.replay()
                after.record()
                after.synchronize()
                times[name].append(before.elapsed_time(after) * 1e3 / len(calls))
        return times


def links(x: torch.Tensor, out: torch.Tensor, calls: Sequence[Call] = ()) -> list[Call]:
    """A small kernel before each call that makes x depend on the previous call's output, so that no call starts early. Without calls:
    the links of 20 calls alone, whose time is subtracted."""
    start, end = x.view(-1)[:1], out.view(-1)[:1]

    def link() -> None:
        start.add_(end, alpha=0)

    def pair(call: Call) -> Call:
        def both() -> None:
            link()
            call()

        return both

    return [pair(call) for call in calls] or [link] * 20


def cold_count(size: int) -> int:
    """The number of copies of `size` bytes such that each has left the cache when it is used again."""
    return max(2, COLD // max(1, size) + 1)


def cold_copies(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Copies of a packed weight, as many as `cold_count` requires."""
    return [[t.clone() for t in tensors] for _ in range(cold_count(sum(t.nbytes for t in tensors)))]


def floor_us(size: int) -> tuple[float, str]:
    """Microseconds of the fastest kernel that reads `size` cold bytes, with as many copies as weights have, and its name;
    0 if they do not fit into memory."""
    fastest = reading(DEVICE, size, copies=cold_count(size), captured=True)
    return fastest.us or 0.0, fastest.how


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over all rows and columns (a single column has too few values at small M)."""
    scale = x.float().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.float() - x.float() @ w.T) / scale).square().mean().sqrt())


def environment() -> dict[str, Any]:
    """The environment in a result file."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
    )
    versions: dict[str, str | None] = {}
    for name in ("torch", "triton", "humming-kernels", "gristmill"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"nvidia_smi": smi.stdout, "versions": versions, "cuda": torch.version.cuda, "time": time.time()}
