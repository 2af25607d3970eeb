"""The candidates for tuning a problem: every kernel that can run it here, with the configurations of its space."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.autotune.place import Place
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.store import config_key

MODEL_SLACK = 3.0
"""A kernel whose estimate exceeds the best one by this factor is not tried."""

MOST = 48
"""Maximum number of configurations per kernel; a larger space is sampled evenly, including its first one."""


@dataclass(frozen=True)
class Job:
    """One problem to tune; `weight` is its relative number of calls, and the largest is tuned first."""

    op: Op
    problem: Problem
    weight: float = 1.0


@dataclass(frozen=True)
class Option:
    """A kernel at a configuration; `default` marks the one that would run untuned."""

    kernel: Kernel
    config: Config
    default: bool

    @property
    def name(self) -> str:
        return f"{self.kernel.name}[{config_key(self.config)}]"


def options(job: Job, here: Place, *, every: bool = False) -> list[Option]:
    """Every kernel that can run and that the cost models do not rule out, with its configurations; large spaces are
    sampled. With `every`, nothing is excluded or sampled."""
    kernels = [k for k in default_registry().kernels_of(job.op.name) if not here.why_not(k, job.problem)]
    kernels = [
        k
        for k in kernels
        if k.auto
        and not here.policy.excludes(k.name)
        and not (k.language == "triton" and here.device == "cpu")
    ]
    estimates = {k.name: k.estimate(job.problem, here.target) if k.estimate else None for k in kernels}
    best = min((us for us in estimates.values() if us is not None), default=None)
    candidates: list[Option] = []
    for kernel in kernels:
        estimate = estimates[kernel.name]
        if not every and best is not None and estimate is not None and estimate > MODEL_SLACK * best:
            continue
        default = dict(kernel.config(job.problem, here.target))
        candidates.append(Option(kernel, default, True))
        others = [dict(c) for c in kernel.space(job.problem, here.target)] if kernel.space is not None else []
        others = [c for c in others if config_key(c) != config_key(default)]
        step = 1 if every else max(1, cdiv(len(others), MOST))
        candidates += [Option(kernel, config, False) for config in others[::step]]
    return candidates
