"""A runner on a CPU that is as late as a GPU may be: what it launches runs when someone waits for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gristmill.runtime.runner import Runner
from gristmill.runtime.steps_in_flight import LaunchedStep, SampledTokens, StepRing


class Queue:
    """The work of a device, in order."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.added = self.done = 0

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        self.added += 1

    def run_to(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.work.pop(0)()


class Event:
    """Like `StreamEvent`."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.after = queue, 0

    def record(self) -> None:
        self.after = self.queue.added

    def synchronize(self) -> None:
        self.queue.run_to(self.after)


class ReadOnce(SampledTokens):
    """A token is gone when it was read, so that one that is read late or twice is an error."""

    def read(self, rows: Tensor) -> Tensor:
        tokens = super().read(rows)
        self.values[rows] = -1
        return tokens


class LateRunner(Runner):
    """A runner whose device computes a step when its ids are collected."""

    ring: type[StepRing] = StepRing
    sampled: type[SampledTokens] = ReadOnce

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.queue = Queue()
        self._failed: LaunchedStep | None = None
        super().__init__(*arguments, **options)
        graphs = self.decode is not None
        self._sampled = self.sampled(self.max_seqs, self.device)
        self._ring = self.ring(self.device)
        for slot in self._ring._slots:
            slot.ended = Event(self.queue)  # type: ignore[assignment]
        if graphs:
            self.make_decode_graphs()

    def _start(self, step: LaunchedStep, work: Callable[[], Tensor | None]) -> None:
        self.queue.add(partial(self._compute, step, work))
        assert step.ended is not None
        step.ended.record()
        step.open = True

    @torch.inference_mode()
    def _compute(self, step: LaunchedStep, work: Callable[[], Tensor | None]) -> None:
        if step is self._failed:
            return  # a device would not have got the rest of a step whose first part failed
        try:
            step.compute(work)
        except BaseException:
            self._failed = step
            raise
        if self.decode is not None:
            self.decode.memory.host[step.slot].fill_(255)  # whatever reads it later reads nonsense
