"""Calls on one GPU as CUDA graphs that are replayed in turn, and the read floor: shared by the programs of `lab` that time launchers
directly, over many copies of a weight.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.reading import reading
from gristmill.autotune.resolve import confirmed_build
from gristmill.autotune.timing import Timed
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key

DEVICE = "cuda:0"
COLD = 260 << 20
"""Total bytes of the copies of a weight: four times the L2 of an H200."""

Call = Callable[[], Any]


class Graphs:
    """Candidates of one problem, each a CUDA graph of calls, replayed in turn. device: None = DEVICE."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device or DEVICE
        self.timed: dict[str, Timed] = {}

    def add(self, name: str, calls: Sequence[Call]) -> None:
        """Capture a graph of these calls, in order. The first few run before the capture, which compiles and loads their kernels."""
        turn = cycle(calls)

        def start() -> None:
            nonlocal turn
            turn = cycle(calls)

        self.timed[name] = Timed(lambda: next(turn)(), self.device, calls=len(calls), start=start)

    def settle(self, seconds: float) -> None:
        """Replay everything for some seconds, so that clocks and power reach their sustained values."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            self.samples(1)

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds per call, by name: one sample per round. Each round starts with the next candidate."""
        times: dict[str, list[float]] = {name: [] for name in self.timed}
        names = list(self.timed)
        for first in range(rounds):
            for name in names[first % len(names) :] + names[: first % len(names)]:
                times[name].append(self.timed[name].sample())
        return times


def add_time(
    store: Store, problem: Problem, kernel: str, config: Config, us: float, device: str | None = None
) -> None:
    """Add the median time of a registered kernel, back to back over cold weights, to a store that is shipped. device: None = DEVICE."""
    device = device or DEVICE
    target = device_target(device, Policy())
    store.add(
        Timing(
            op=problem.op,
            kernel=kernel,
            code="",
            config=config,
            problem=str(problem),
            target=target_key(target),
            toolchain=confirmed_build(default_registry(), target).key(),
            us=round(us, 3),
            timing="eager,cold" if device == "cpu" else "graph,cold",
        )
    )


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
