"""Timing of a collective kernel in one rank of a worker group. All ranks make the same calls.

A barrier precedes each round, so that a round includes no wait for a late rank but the skew of the barrier.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.autotune.device import on_device
from gristmill.autotune.guard import tensors, written
from gristmill.autotune.timing import GPU_CALLS, Timed, list_count
from gristmill.autotune.verify import kernel_arguments, with_workspace
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.load import load

CAPTURED = 100
"""Calls in a graph. Ranks leave a barrier some microseconds apart; more calls make the skew per call small."""


def time_together(
    op: Op, kernel: Kernel, config: Config, problem: Problem, device: str, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per call of each round, by timing mode (``graph,cold`` ...), of this rank.

    Arguments that the operation writes begin as zeros: sums in place of sums stay finite over any number of calls. A kernel that
    cannot be captured is timed eagerly only.
    """
    import torch.distributed as dist

    run = load(kernel)
    times: dict[str, list[float]] = {}
    for hot in (False, True):
        sets: list[list[Any]] = []
        with on_device(device):
            while not sets or len(sets) < list_count(_size(sets[0]), device, hot=hot):
                sets.append(_arguments(op, kernel, config, problem, len(sets), device))
        for graph in (True, False) if kernel.capturable and device != "cpu" else (False,):
            turn = _Turn(run, config, [op.Call(*one) for one in sets])
            timed = Timed(
                turn.step,
                device,
                calls=CAPTURED if graph else max(GPU_CALLS, len(sets)),
                graph=graph,
                start=turn.start,
            )
            samples = []
            for _ in range(rounds + 1):
                dist.barrier()
                samples.append(timed.sample())
            mode = ("graph," if graph else "eager,") + ("hot" if hot else "cold")
            times[mode] = samples[1:]
    return times


class _Turn:
    """Calls of a kernel over argument lists in turn."""

    def __init__(self, run: Any, config: Config, calls: list[Any]) -> None:
        self._run, self._config, self._calls, self._next = run, config, calls, 0

    def start(self) -> None:
        """Begin with the first list."""
        self._next = 0

    def step(self) -> None:
        """One call."""
        self._run(self._config, self._calls[self._next])
        self._next = (self._next + 1) % len(self._calls)


def _arguments(op: Op, kernel: Kernel, config: Config, problem: Problem, seed: int, device: str) -> list[Any]:
    """A list of arguments and outputs."""
    arguments = with_workspace(
        op, kernel, config, problem, kernel_arguments(op, kernel, op.inputs(problem, seed, device))
    )
    for tensor in written(op, arguments):
        tensor.zero_()
    outputs = op.like(*arguments) if op.outputs else ()
    return [*arguments, *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs)]


def _size(arguments: list[Any]) -> int:
    """Bytes of a list."""
    return sum(t.numel() * t.element_size() for a in arguments for t in tensors(a))
