"""A fixture for pytest-benchmark: a test suite measures kernels of the registry as `kernelbench` does.

In a conftest.py:

    pytest_plugins = ["gristmill.bench.pytest_plugin"]

and in a test:

    def test_norm(kernel_benchmark):
        times = kernel_benchmark("rms_norm", "m=64,n=4096", kernel="rms_norm_cpu")
        assert times.us < 100

What pytest-benchmark then shows, stores and compares (--benchmark-json, --benchmark-compare) are microseconds per call on the
device: over rotated arguments, as a CUDA graph on a GPU, and audited before, while and after, so that a kernel that is wrong
fails its test. Needs the extra `pytest`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gristmill.autotune.place import Place, imported, place
from gristmill.autotune.rounds import ROUNDS
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

AUDITS = 4
"""Rounds between audits, besides the first and the last."""


@dataclass(frozen=True)
class KernelTimes:
    """The measurement.

    Attributes:
        us: the median of samples, microseconds per call.
        error: the largest of all audits, in the operation's error metric.
        tolerance: its limit.
        timing: the timing mode, such as "graph,cold".
    """

    kernel: str
    us: float
    samples: tuple[float, ...]
    error: float
    tolerance: float
    timing: str


class _Clock:
    """The clock of pytest-benchmark: the device time of samples, without the time between them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def _kernel_clock(request: pytest.FixtureRequest) -> _Clock:
    """Set the timer in the test's marker before `benchmark` reads it."""
    clock = _Clock()

    def kernelbench() -> float:  # named in pytest-benchmark's reports
        return clock()

    marker = request.node.get_closest_marker("benchmark")
    options = {**(marker.kwargs if marker else {}), "timer": kernelbench}
    request.node.add_marker(pytest.mark.benchmark(**options), append=False)
    return clock


@pytest.fixture
def kernel_benchmark(_kernel_clock: _Clock, benchmark: Any) -> Callable[..., KernelTimes]:
    """``kernel_benchmark(op, problem, kernel=None, *, target=None, hot=False, rounds=16)`` -> `KernelTimes`, once a test.

    The kernel is a name, a `Kernel`, or None for the selected one; the target as in ``kernelbench --target``, None for the first GPU, else
    the CPU. If `hot`, arguments stay in the cache. A kernel that cannot run here skips the test and says why; a problem that it does not
    take is a ValueError; a wrong result is a `WrongResultError`. On a GPU a registered kernel is verified in a child process first.
    """

    def run(
        op: str,
        problem: str,
        kernel: str | Kernel | None = None,
        *,
        target: str | None = None,
        hot: bool = False,
        rounds: int = ROUNDS,
    ) -> KernelTimes:
        from gristmill.autotune.candidate import Candidate, WrongResultError, shared_rotations
        from gristmill.bench.compare import verified

        here, known = place(target), default_registry().op(op)
        if here.device is None:
            pytest.skip(f"{here.target.name} is not a device of this machine")
        parsed = known.problem(problem)
        chosen, config = _chosen(known, kernel, parsed, here)
        # On a GPU a fault destroys the context, and later tests fail with it: verification in a child process comes first.
        if here.device != "cpu" and (wrong := verified(known, chosen, config, parsed, here.device)):
            raise WrongResultError(f"{chosen.name}: {wrong}")
        candidate = Candidate(
            chosen, config, shared_rotations(known, parsed, here.device, [chosen], hot=hot)[chosen.name]
        )
        samples: list[float] = []

        def sample() -> None:
            us = candidate.sample()
            samples.append(us)
            _kernel_clock.seconds += us * 1e-6

        def before() -> None:
            if len(samples) % AUDITS == AUDITS - 1:
                candidate.audit()

        benchmark.group = benchmark.group or f"{op} {parsed}"
        benchmark.pedantic(sample, setup=before, rounds=rounds)
        candidate.conclude()
        cost, us = known.cost(parsed), statistics.median(samples)
        benchmark.extra_info |= {
            "op": op,
            "problem": str(parsed),
            "kernel": chosen.name,
            "config": dict(config),
            "target": here.target.name,
            "device": here.target.device,
            "timing": candidate.timing,
            "error": candidate.error,
            "tolerance": known.tolerance(parsed).limit,
            "gbs": cost.bytes / us / 1e3,
            "tflops": cost.flops / us / 1e6,
        }
        return KernelTimes(
            chosen.name, us, tuple(samples), candidate.error, known.tolerance(parsed).limit, candidate.timing
        )

    return run


def _chosen(op: Op, kernel: str | Kernel | None, problem: Problem, here: Place) -> tuple[Kernel, Config]:
    """The kernel to measure and its configuration."""
    if kernel is None:
        from gristmill.autotune.resolve import Resolver

        best = Resolver(here.device or "cpu", here.policy).resolve(op, problem).require()
        return best.kernel, best.config or {}
    spec = default_registry().kernel(op.name, kernel) if isinstance(kernel, str) else kernel
    here = imported(here, [spec])
    if refusal := spec.accepts(problem):
        raise ValueError(f"{spec.name} does not take {problem}: {refusal}")
    if against := spec.why_not(problem, here.target, here.build):
        pytest.skip(f"{spec.name} cannot run here: {'; '.join(against)}")
    return spec, spec.config(problem, here.target)
