"""The example problems of every kernel that can run at a place: what `verify` and `prove` run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from gristmill.autotune.place import Place, imported, place
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import UnknownError, default_registry


@dataclass(frozen=True)
class Example:
    """A kernel on one of its example problems, in its default configuration there."""

    op: Op
    kernel: Kernel
    problem: Problem
    config: Config

    def __str__(self) -> str:
        return f"{self.kernel.name} {self.problem}"

    def verify(self, worker: Any, device: str) -> dict[str, Any]:
        """The outcome, in a child process of `worker`; of collective operations in one per rank."""
        from gristmill.autotune.worker_group import shared_group

        world = self.op.world(self.problem)
        together = worker if world == 1 else shared_group(world)
        outcome: dict[str, Any] = together.verify(self.op, self.kernel, self.config, self.problem, device)
        return outcome


def examples(
    target: str | None, op_name: str | None, kernel_name: str | None
) -> tuple[Place, list[Example], dict[str, str]]:
    """(the place, the examples that run there, kernel -> why it runs none of its own). None: the first device, every operation, every kernel.

    UsageError: nothing runs at the target, or the named kernel does not; UnknownError: a name.
    """
    registry, here = default_registry(), place(target)
    if here.device is None:
        raise click.UsageError(f"{here.target.name} is not a device of this machine; nothing can run on it")
    if op_name is not None:
        registry.op(op_name)
    kernels = [k for k in registry.all_kernels() if op_name in (None, k.op)]
    meant = [k for k in kernels if kernel_name in (None, k.name)]
    if kernel_name and not meant:
        raise UnknownError(f"no kernel called {kernel_name!r}" + (f" of {op_name}" if op_name else ""))
    here = imported(here, meant)
    runs: list[Example] = []
    refused: dict[str, str] = {}
    for kernel in meant:
        op = registry.op(kernel.op)
        reasons, before = [], len(runs)
        for text in op.test_problems(kernel):
            problem = op.problem(text)
            if why := kernel.why_not(problem, here.target, here.build):
                reasons.append("; ".join(why))
            else:
                runs.append(Example(op, kernel, problem, kernel.config(problem, here.target)))
        if len(runs) == before:
            refused[kernel.name] = reasons[0] if reasons else "accepts none of the examples"
    if kernel_name and not runs:
        raise click.UsageError(f"{kernel_name} cannot run on {here.target.name}; see kernelbench list")
    return here, runs, refused
