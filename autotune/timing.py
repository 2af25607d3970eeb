"""How calls are timed: one method for kernels, peers and ceilings.

On a CPU a sample is the number of calls that takes about a millisecond, by the clock. On a GPU it is a fixed number of calls on
their own stream, between two events: as one captured graph, or eagerly, so that the time includes the host.
The function `step` decides whether calls find their arguments in memory or in the cache (`gristmill.autotune.rotation`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gristmill.autotune import clock
from gristmill.autotune.captures import capturing
from gristmill.autotune.device import on_device
from gristmill.kernel_registry.scheme import cdiv

CPU_COLD = 128 << 20
GPU_COLD = 256 << 20
"""Bytes over which arguments rotate: several times the last-level cache of the devices in use."""

MAX_SETS = 64


def cold_bytes(device: str) -> int:
    """Bytes over which arguments rotate on a device."""
    return GPU_COLD if device.startswith("cuda") else CPU_COLD


def list_count(size: int, device: str, *, hot: bool = False) -> int:
    """The number of argument lists of `size` bytes that calls rotate over: enough that they are not cached, up to MAX_SETS; one if hot.

    Small lists stay in the cache nevertheless: 64 of them fit.
    """
    return 1 if hot else max(2, min(MAX_SETS, cdiv(cold_bytes(device), max(size, 1))))


GPU_CALLS = 20
"""Minimum number of calls per sample on a GPU."""

SAMPLE_US = 1000.0
"""Minimum duration of a sample on a CPU: several thousand ticks of the clock."""


@dataclass(frozen=True)
class Measured:
    """The time per call.

    Attributes:
        us: the median in microseconds.
        spread: (third quartile - first) / median.
        samples: every round, microseconds.
    """

    us: float
    spread: float
    samples: tuple[float, ...]


class CaptureError(RuntimeError):
    """Calls that cannot be captured, most likely because of work on another stream that is not synchronised."""


class Timed:
    """`step`, which makes one call on the current stream, called over and over and timed. Nothing runs before queued work is done.

    Args:
        start: puts `step` at its beginning.
        calls: how many make a sample; on the CPU None, for about a millisecond's worth.
        graph: on a GPU, capture them; CaptureError if that cannot be.
    """

    def __init__(
        self,
        step: Callable[[], object],
        device: str,
        *,
        calls: int | None = None,
        graph: bool = True,
        start: Callable[[], None] = lambda: None,
    ) -> None:
        self._step, self._device = step, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.calls = calls or 1
        if device != "cpu":
            with on_device(device):
                self._prepare(graph, calls or GPU_CALLS, start)
            return
        start()
        self.sample()
        once = min(self.sample() for _ in range(3))
        self.calls = calls or max(1, round(SAMPLE_US / max(once, 0.1)))

    @property
    def captured(self) -> bool:
        """Whether samples replay a graph."""
        return self._graph is not None

    def sample(self, calls: int | None = None) -> float:
        """Microseconds per call, over `calls` calls instead of the usual number; a graph always makes all of its own."""
        if self.stream is not None:
            with on_device(self._device):
                return self._on_gpu(self.stream, calls or self.calls)
        step, count = self._step, calls or self.calls
        begin = clock.now()
        for _ in range(count):
            step()
        return (clock.now() - begin) / count * 1e6

    def _prepare(self, graph: bool, calls: int, start: Callable[[], None]) -> None:
        stream = self.stream = torch.cuda.Stream()
        # The arguments were written on the current stream. A call that overtook those writes would take what the memory held
        # before as indices, and read out of bounds.
        stream.wait_stream(torch.cuda.current_stream())
        self.calls = calls
        with torch.cuda.stream(stream):
            start()
            for _ in range(min(3, calls)):
                self._step()
            stream.synchronize()
            start()
            if not graph:
                return
            captured_graph = torch.cuda.CUDAGraph()
            try:
                with capturing(captured_graph, stream=stream):
                    for _ in range(calls):
                        self._step()
            except RuntimeError as error:
                raise CaptureError(str(error)) from error
            self._graph = captured_graph

    def _on_gpu(self, stream: torch.cuda.Stream, calls: int) -> float:
        torch.cuda.synchronize()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            before.record(stream)
            if self._graph is not None:
                self._graph.replay()
            else:
                for _ in range(calls):
                    self._step()
            after.record(stream)
            # Only this stream: work left on another one is not waited for, and an audit finds it unfinished.
            stream.synchronize()
        elapsed: float = before.elapsed_time(after)
        return elapsed * 1e3 / (self.calls if self._graph is not None else calls)


def measure_call(call: Callable[[], object], device: str, *, rounds: int = 9) -> Measured:
    """Time a call that takes no arguments: ceilings, dispatch costs."""
    timed = Timed(call, device)
    timed.sample()
    return summarize([timed.sample() for _ in range(rounds)])


def summarize(samples: Sequence[float]) -> Measured:
    """Median and relative interquartile spread."""
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle, middle, middle)
    return Measured(middle, (high - low) / middle if middle else 0.0, tuple(samples))
