"""How a GPU spends its time in steps that are traced (CUPTI, through torch.profiler): the kernels of a step, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LONG_GAP = 5.0
"""Microseconds between two kernels that are longer than what lies between the kernels of a graph."""
Span = tuple[float, float, str]
"""Begin and end of a kernel or copy in microseconds, and its name."""


@dataclass(frozen=True)
class Trace:
    """Steps on the device, in microseconds per step.

    Attributes:
        batch, steps: what was traced.
        step: from the first kernel of a step to that of the next one.
        idle: no kernel or copy runs.
        long_idle: in pieces of more than LONG_GAP.
        launches: kernels and copies per step.
        kernels: the largest, by name.
    """

    batch: int
    steps: int
    step: float
    idle: float
    long_idle: float
    launches: float
    kernels: dict[str, float]


def recorded(run: Callable[[], Any]) -> list[Span]:
    """What the device did during `run`, which must end with a synchronization, in the order of the begins."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.profiler.DeviceType.CUDA and not event.is_user_annotation
    )


def summary(spans: Sequence[Span], batch: int, steps: int) -> Trace:
    """The trace of kernels and copies in the order of their begins. ValueError if there are none: then nothing was recorded."""
    if not spans:
        raise ValueError("the profiler recorded no kernel: CUPTI is missing, or another profiler has it")
    idle, long_idle, end = 0.0, 0.0, spans[0][0]
    times: dict[str, float] = {}
    for begin, stop, name in spans:
        if begin > end:
            idle += begin - end
            long_idle += begin - end if begin - end > LONG_GAP else 0.0
        end = max(end, stop)
        times[name[:90]] = times.get(name[:90], 0.0) + stop - begin
    whole = end - spans[0][0]
    largest = sorted(times.items(), key=lambda item: -item[1])[:30]
    kernels = {name: round(value / steps, 2) for name, value in largest}
    return Trace(batch, steps, whole / steps, idle / steps, long_idle / steps, len(spans) / steps, kernels)
