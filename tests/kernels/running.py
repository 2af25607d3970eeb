"""Helpers shared by the tests of single operations: the kernels that run here, calls with real strides,
planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.autotune.verify import Outcome, verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.load import load
from tests.conftest import HAS_GPU

REGISTRY = default_registry()
CPU = device_target("cpu", Policy())
BUILD = confirmed_build(REGISTRY, CPU)


@dataclass(frozen=True)
class Runnable:
    """A kernel on a target of this machine (one per C++ level). Its string, used in test ids, names both."""

    op: Op
    kernel: Kernel
    target: Target

    def __str__(self) -> str:
        return self.kernel.name if self.kernel.language != "cpp" else f"{self.kernel.name}-{self.target.name}"

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Launch on the arguments and outputs as they are, strides included, after the operation's own checks."""
        call = self.op.Call(*arguments, **named)
        problem = self.op.describe(*call.arguments())
        assert self.kernel.accepts(problem) is None
        if self.op.guard(self.op.static(problem))(call):
            load(self.kernel)(self.kernel.config(problem, self.target), call)


def runnables(op: str) -> list[Runnable]:
    """Returns every kernel of `op` that runs on this CPU: torch, C++ at each level, Triton in the
    interpreter."""
    runnable = []
    for kernel in REGISTRY.kernels_of(op):
        levels = [Target.parse(level) for level in CPU.levels] if kernel.language == "cpp" else [CPU]
        for target in levels:
            skip = kernel.language == "triton" and HAS_GPU
            if not (
                skip
                or kernel.requires.check_hardware(target, BUILD)
                or kernel.requires.check_build(target, BUILD)
            ):
                runnable.append(Runnable(REGISTRY.op(op), kernel, target))
    return runnable


def scheme_of(implementation: Runnable, axes: str, schemes: Sequence[str]) -> str | None:
    """The first of some schemes of weights in which the kernel takes a token of a problem of experts with these axes; None if it takes none."""
    kernel, axes = implementation.kernel, re.sub(r"\bm=\d+", "m=1", axes)
    for scheme in schemes:
        held = any(REGISTRY.layout(name).accepts(scheme) for name in kernel.layouts)
        if held and kernel.accepts(implementation.op.problem(f"{axes},w={scheme}")) is None:
            return scheme
    return None


BLOCKS = ("mxfp8.mxfp8", "nvfp4.nvfp4", "fp8_block.fp8_g128")
"""Schemes of weights and activations in blocks."""


def verify_fault(op: str, module: str, launcher: str, problem: str, layout: str | None = None) -> Outcome:
    """Returns the verdict on a wrong kernel: the function `launcher` of the test module `module`, which gets weights in `layout`.
    AssertionError if it ended in an exception, which would prove nothing."""
    definition = REGISTRY.op(op)
    kernel = Kernel(
        op=op,
        name=launcher,
        provider="test",
        language="python",
        target=f"{module}:{launcher}",
        requires=Requirement(),
        layouts=() if layout is None else (layout,),
    )
    outcome = verify(definition, kernel, {}, definition.problem(problem), "cpu")
    assert not re.match(r"\w*(Error|Exception): ", outcome.reason), outcome.reason
    return outcome


def padded_rows(rows: torch.Tensor, extra: int = 5) -> torch.Tensor:
    """Returns the same [M, N] values as a view of a wider buffer of NaN: reads past a row give NaN, and the
    row stride is odd."""
    buffer = torch.full((rows.shape[0] + 1, rows.shape[1] + extra), float("nan"), dtype=rows.dtype)
    view = buffer[: rows.shape[0], 2 : 2 + rows.shape[1]]
    view.copy_(rows)
    return view


def close(
    actual: torch.Tensor, expected: torch.Tensor, op: str, text: str, make: Callable[..., float] | None = None
) -> bool:
    """Whether `actual` is within the tolerance of the operation's metric (or of `make(actual, expected)`) for
    this problem."""
    from gristmill.autotune.metrics import METRICS

    definition = REGISTRY.op(op)
    tolerance = definition.tolerance(definition.problem(text))
    return (make or METRICS[tolerance.metric])(actual, expected) <= tolerance.limit


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among `values`."""
    return [value for value in values if isinstance(value, torch.Tensor)]
