"""Kernels that read a layout which no other kernel reads on a CPU, and a worker that decides which of their problems they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from gristmill.autotune import binding, resolve
from gristmill.autotune.verify import verify
from gristmill.autotune.worker import Worker, Workers
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.quant.packed import Packed, unpack
from gristmill.quant.tensor import QuantTensor
from tests.calls import positional

LAYOUT = "w4_frag16_v1"
REASON = "ValueError: planted"


@positional
def _unpacked(config: Config, tensors: list[Tensor], *shape: int) -> QuantTensor:
    slots = dict(zip(default_registry().layout(LAYOUT).slots, tensors, strict=True))
    return unpack(Packed(LAYOUT, QuantScheme.parse(str(config["scheme"])), shape, slots))


@positional
def experts(
    config: Config, x: Tensor, weights: Tensor, ids: Tensor, w13: Any, w2: Any, inter: int, *rest: Any
) -> None:
    """The launcher of `moe`."""
    count, hidden = w13[0].shape[0], x.shape[1]
    both = _unpacked(config, w13, count, 2 * inter, hidden), _unpacked(config, w2, count, hidden, inter)
    rest[-1].copy_(default_registry().op("moe").reference(x, weights, ids, *both, inter, *rest[:-1]))


@positional
def linear(
    config: Config, x: Tensor, weight: Any, bias: Any, residual: Any, silu_mul: bool, n: int, *rest: Any
) -> None:
    """The launcher of `linear`."""
    whole = _unpacked(config, weight, n, x.shape[-1])
    rest[-1].copy_(default_registry().op("linear").reference(x, whole, bias, residual, silu_mul))


def _config(problem: Problem, target: Target) -> Config:
    return {"scheme": problem.text("w")}


def _accepts(problem: Problem) -> str | None:
    return None if problem.text("w") == "int4_g128" else "planted for int4_g128"


EXPERTS, LINEAR = (
    Kernel(
        op=op,
        name=f"{op}_planted",
        provider="test",
        language="python",
        target=f"{__name__}:{launcher}",
        requires=Requirement(),
        accepts=_accepts,
        config=_config,
        layouts=(LAYOUT,),
        priority=1000,
        module=__name__,
    )
    for op, launcher in (("moe", "experts"), ("linear", "linear"))
)


class Judge(Worker):
    """Verifies in this process; `fails` says which problems of the planted kernels do not match. asked: (kernel, problem)."""

    def __init__(self, fails: Callable[[Problem], bool]) -> None:
        super().__init__()
        self.fails = fails
        self.asked: list[tuple[str, str]] = []

    def verify(self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> dict[str, Any]:
        self.asked.append((kernel.name, str(problem)))
        if kernel.name in (EXPERTS.name, LINEAR.name) and self.fails(problem):
            return {"ok": False, "error": None, "reason": REASON, "judged": True}
        outcome = verify(op, kernel, config, problem, device)
        return {"ok": outcome.ok, "error": outcome.error, "reason": outcome.reason, "judged": True}

    @property
    def of_planted(self) -> list[str]:
        """The problems that planted kernels were verified on, in order."""
        return [problem for kernel, problem in self.asked if kernel in (EXPERTS.name, LINEAR.name)]


@contextmanager
def planted(*kernels: Kernel, fails: Callable[[Problem], bool] = lambda problem: False) -> Iterator[Judge]:
    """Resolvers that are made meanwhile have these kernels too, and verify with the judge."""
    registry, judge = default_registry().copy(), Judge(fails)
    for kernel in kernels:
        registry.add(kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "default_registry", lambda: registry)
        patch.setattr(resolve, "shared_workers", lambda: Workers(judge))
        patch.setattr(binding, "_RESOLVERS", {})
        yield judge
