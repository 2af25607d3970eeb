"""A kernel on a problem, ready to be timed in turn with others, and audited while it is.

An audit is a timed sample like any other, over arguments whose content was just replaced in place and whose outputs were
poisoned: afterwards they must hold what the reference makes of the new content. See `gristmill.autotune.rotation`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from gristmill.autotune.device import on_device
from gristmill.autotune.rotation import Rotation
from gristmill.bench import clock
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernels.interpreter import load

SAMPLE_US = 1000.0
"""What one sample should take at least: several thousand steps of the clock."""

LEAD = 3
"""Calls of an audit that are checked but not timed: the refresh left the memory allocator and the caches in another state."""

STALE, COLD_US = 1.5, 2.0
"""How much slower than its usual time a kernel may be on content that it has not seen: this factor, and microseconds for
code and tables that the refresh drove out of the cache."""

_sleep = time.sleep


class WrongResultError(RuntimeError):
    """A kernel did not do, while it was timed, what it is timed for."""


class KernelArm:
    """`kernel` at `config` over the argument lists of `rotation`. name: in tables; the kernel's own by default.

    error: the worst error figure of all audits. repeatable: equal inputs gave equal bits in all of them.
    WrongResultError, at construction or from `audit`, says what was wrong.
    """

    def __init__(self, kernel: Kernel, config: Config, rotation: Rotation, *, name: str = "") -> None:
        self.name, self.kernel, self.config, self.rotation = name or kernel.name, kernel, dict(config), rotation
        self.error, self.repeatable = 0.0, True
        self.samples: list[float] = []
        self.fresh: list[float] = []
        self._clock = clock.originals()
        self._launch = load(kernel)
        self._replay: _Graph | None = None
        self.calls = 1
        if rotation.device != "cpu":
            with on_device(rotation.device):
                self._replay = _Graph(self)
        else:
            self._warm()
        self.audit()

    @property
    def timing(self) -> str:
        """How it is timed, as entries of the store say it."""
        return ("eager" if self._replay is None else "graph") + (",hot" if len(self.rotation.sets) == 1 else ",cold")

    def sample(self) -> float:
        """Microseconds a call, over `calls` of them."""
        us = self._sample(self.calls)
        self.samples.append(us)
        return us

    def audit(self) -> None:
        """A sample over fresh content, checked. WrongResultError names what was wrong."""
        rotation = self.rotation
        rotation.refresh()
        # Once around, at most: a second call on the same list would start from what the first left, if it works in place.
        count = len(rotation.sets) if self._replay is not None else min(max(self.calls, 2 * LEAD), len(rotation.sets))
        threads = _threads()
        if self._replay is not None:
            with on_device(rotation.device):
                self.fresh.append(self._replay.sample(once=True))
        else:
            lead = min(LEAD, count // 2)
            for _ in range(lead):
                self._launch(self.config, *rotation.next())
            self.fresh.append(self._sample(count - lead))
        results = rotation.snapshot(count)
        started = len(_threads() - threads)
        if self._replay is not None:
            torch.cuda.synchronize()
        else:
            _sleep(0.002)  # whoever is still at work has time to show it
        finding = rotation.check(results)
        self.repeatable &= finding.repeatable
        self.error = max(self.error, finding.error or 0.0)
        wrong = finding.wrong
        if not wrong and rotation.device == "cpu" and started:
            wrong = f"left {started} thread(s) running when the call returned"
        if not wrong and (changed := clock.tampered(self._clock)):
            wrong = f"replaced {changed}"
        if not wrong and not self.repeatable and self.kernel.deterministic:
            wrong = "equal inputs gave different bits, and it is declared deterministic"
        if wrong:
            raise WrongResultError(f"{self.kernel.name}: {wrong}")

    def conclude(self) -> None:
        """A last audit; and fresh content must not have been slower than what was seen before."""
        self.audit()
        if not self.samples:
            return
        usual = statistics.median(self.samples)
        most = STALE * usual + COLD_US
        for _ in range(5):  # the least of several: one may have been disturbed
            if min(self.fresh[1:]) <= most:
                break
            self.audit()
        if (fresh := min(self.fresh[1:])) > most:
            raise WrongResultError(
                f"{self.kernel.name}: {fresh:.3g} us a call on content it had not seen, {usual:.3g} us on content it had: "
                "it reuses results"
            )

    def _sample(self, calls: int) -> float:
        if self._replay is not None:
            with on_device(self.rotation.device):
                return self._replay.sample()
        launch, config, following = self._launch, self.config, self.rotation.next
        begin = clock.now()
        for _ in range(calls):
            launch(config, *following())
        return (clock.now() - begin) / calls * 1e6

    def _warm(self) -> None:
        self._sample(1)
        once = min(self._sample(1) for _ in range(3))
        self.calls = max(1, round(SAMPLE_US / max(once, 0.1)))


class _Graph:
    """All argument lists once around as one CUDA graph; without one where the kernel cannot be captured."""

    def __init__(self, arm: KernelArm) -> None:
        self._arm = arm
        lists = len(arm.rotation.sets)
        # A call that works in place must not follow another on the same list.
        self.calls = lists if arm.rotation.in_place else max(lists, 20)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.cuda.stream(self._stream):
            arm.rotation.turn = 0
            self._run(min(3, self.calls))
            self._stream.synchronize()
            arm.rotation.turn = 0
            if arm.kernel.capturable:
                self._graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(self._graph, stream=self._stream):
                        self._run(self.calls)
                except RuntimeError as error:  # work on another stream, most likely, which nobody would wait for
                    raise WrongResultError(f"{arm.kernel.name}: cannot be captured, and is declared to be: {error}") from error

    def _run(self, calls: int) -> None:
        for _ in range(calls):
            self._arm._launch(self._arm.config, *self._arm.rotation.next())

    def sample(self, once: bool = False) -> float:
        """Microseconds a call; the copies that an audit takes next are ordered behind it, other streams are not.

        once: without a graph, once around the lists only: a second time would leave an unfinished call's work looking done.
        """
        calls = len(self._arm.rotation.sets) if once and self._graph is None else self.calls
        torch.cuda.synchronize()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            before.record(self._stream)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._run(calls)
            after.record(self._stream)
            self._stream.synchronize()
        return before.elapsed_time(after) * 1e3 / calls


def shared_rotations(op: Any, problem: Any, device: str, kernels: Sequence[Kernel], *, hot: bool = False) -> dict[str, Rotation]:
    """A rotation for each kernel, the same one for kernels that take the same arguments: equal data at equal addresses."""
    made: dict[Any, Rotation] = {}
    found = {}
    for kernel in kernels:
        key = None if op.pack is None else kernel.layouts or kernel.name
        if key not in made:
            made[key] = Rotation(op, kernel, problem, device, hot=hot)
        found[kernel.name] = made[key]
    return found


def _threads() -> set[str]:
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()
