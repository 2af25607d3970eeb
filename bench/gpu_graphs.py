"""Calls on one GPU as CUDA graphs that are replayed in turn, and the floor of some bytes: what the programs of `bench` share that time
launchers directly, over many copies of a weight.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton
import triton.language as tl

from gristmill.autotune.captures import capturing

DEVICE = "cuda:0"
COLD = 260 << 20
"""Bytes that copies of a weight rotate over: four times the L2 of an H200."""

Call = Callable[[], Any]


@triton.jit
def _read(data, sink, count, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * PARTS)
    for part in tl.static_range(PARTS):
        at = base + part * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(data + at, mask=at < count, other=0)
    found = tl.sum((total == 0x5A5A1234).to(tl.int32))
    tl.store(sink, found, mask=found == BLOCK)


class Graphs:
    """Candidates of one problem, each a CUDA graph of calls, replayed in turn."""

    def __init__(self) -> None:
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Sequence[Call]]] = {}

    def add(self, name: str, calls: Sequence[Call]) -> None:
        """A graph of these calls, in order; the first one runs before, so that what is compiled or loaded is.

        The calls are kept as long as the graph, which writes to their workspaces: capturing the next one empties torch's cache.
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
        """Replays everything for some seconds, so that clocks and power are those of work that goes on."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            self.samples(1)

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds a call, by name: one sample a round, each round starting one candidate further on."""
        taken: dict[str, list[float]] = {name: [] for name in self.graphs}
        names = list(self.graphs)
        for first in range(rounds):
            for name in names[first % len(names) :] + names[: first % len(names)]:
                graph, calls = self.graphs[name]
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                graph.replay()
                after.record()
                after.synchronize()
                taken[name].append(before.elapsed_time(after) * 1e3 / len(calls))
        return taken


def links(x: torch.Tensor, out: torch.Tensor, calls: Sequence[Call] = ()) -> list[Call]:
    """A small kernel before each call, after which x depends on what the call before wrote, so that none starts ahead of it. Without calls
    as many links as 20 calls have, to be taken off."""
    start, end = x.view(-1)[:1], out.view(-1)[:1]

    def link() -> None:
        start.add_(end, alpha=0)

    def pair(call: Call) -> Call:
        return lambda: (link(), call())

    return [pair(call) for call in calls] or [link] * 20


def cold_copies(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Copies of a packed weight, enough that each is out of the cache when its turn comes again."""
    count = max(2, COLD // max(1, sum(t.nbytes for t in tensors)) + 1)
    return [[t.clone() for t in tensors] for _ in range(count)]


def cold_data() -> torch.Tensor:
    """Memory for `floor_us`."""
    return torch.randint(0, 1 << 30, ((2 * COLD + (512 << 20)) // 4,), dtype=torch.int32, device=DEVICE)


def floor_us(data: torch.Tensor, size: int) -> tuple[float, str]:
    """Microseconds of the fastest of 12 kernels that read `size` cold bytes of `data`, and which one."""
    count, copies = size // 4, max(2, COLD // size + 1)
    sink, step = torch.zeros(1, dtype=torch.int32, device=DEVICE), -(-size // 4 // 64) * 64
    best = (float("inf"), "")
    for block in (1024, 2048, 4096):
        for parts in (1, 2):
            for warps in (4, 8):

                def call(i: int, block: int = block, parts: int = parts, warps: int = warps) -> None:
                    grid = (-(-count // (block * parts)),)
                    _read[grid](data[i % copies * step :], sink, count, BLOCK=block, PARTS=parts, num_warps=warps)

                graphs = Graphs()
                graphs.add("read", [lambda i=i: call(i) for i in range(max(copies, 20))])
                best = min(best, (statistics.median(graphs.samples(5)["read"]), f"{block}x{parts}, {warps} warps"))
    return best


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over all rows and columns (few rows say little about one column)."""
    scale = x.float().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.float() - x.float() @ w.T) / scale).square().mean().sqrt())


def environment() -> dict[str, Any]:
    """What a result file says of the machine at one moment."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
    )
    versions = {}
    for name in ("torch", "triton", "humming-kernels", "gristmill"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"nvidia_smi": smi.stdout, "versions": versions, "cuda": torch.version.cuda, "time": time.time()}
