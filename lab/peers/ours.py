"""gristmill's candidates: what selection takes for a layer, and the best of the other kernels that could run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from gristmill.autotune.guard import written
from gristmill.autotune.packing import plan_layouts
from gristmill.autotune.verify import allocate_workspace
from gristmill.kernel_registry.grades import GRADES
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import BUCKETS, bucket_index, bucket_sizes
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.load import load
from gristmill.quant import QuantTensor, pack
from gristmill.runtime.layers.plans import LARGE_STEP, Plans
from lab.peers.adapter import Adapter, Arguments, Run

OWN = ("gristmill", "torch", "deepgemm")
"""Providers of our candidates: what plans take where it is installed and a shipped time says so. Other wrapped libraries are peers."""


@dataclass(frozen=True)
class Choice:
    """A kernel with its configuration, why it was selected, and the problem that says how large its workspace is."""

    kernel: Kernel
    config: Config
    layout: str | None
    source: str
    largest: Problem

    @property
    def adapter(self) -> Adapter:
        """How it is called, over weights packed in its layout. As in a model, all calls share a workspace, and outputs are where those of the
        call before were: peers allocate theirs, and get the same memory again.
        """
        op = default_registry().op(self.kernel.op)
        workspace = cache(partial(allocate_workspace, op, self.kernel, self.config, self.largest))
        return Adapter(
            op=op.name,
            bind=partial(_bind, op, self, workspace, cache(_poisoned)),
            pack=partial(_packed, self.layout),
            outputs=partial(_outputs, op),
        )


class Selection:
    """Selection on a device. Candidates are checked by the race instead of by a verification of their own."""

    def __init__(self, device: str) -> None:
        wrapped = tuple(k.name for k in default_registry().all_kernels() if k.provider not in OWN)
        policy = Policy.current()
        policy = replace(policy, exclude=(*policy.exclude, *wrapped), grades=tuple(GRADES))
        index = torch.device(device)
        self.plans = Plans(index, torch.bfloat16, policy)

    def choices(self, op: Op, problem: Problem, others: int) -> list[Choice]:
        """The choice of a layer's plan, then at most so many other kernels over the same packed weights, the fastest expected first.

        NoKernelError: nothing can be selected.
        """
        static, resolver = op.static(problem), self.plans.resolver
        layouts = plan_layouts(resolver, static) if op.pack is not None else None
        plan = self.plans.bind_packed(static, layouts)
        size = problem.integer(op.bucket) if op.bucket else 1
        entry = plan.entry(size)
        kernel, bucket, largest = resolver.kernel(op, entry.kernel), bucket_index(size), _largest(op, problem)
        found = [Choice(kernel, dict(entry.config), entry.layout, entry.source, largest)]
        at = op.at_bucket(static, bucket_sizes()[bucket])
        for candidate in resolver.select(op, at, layouts).candidates:
            kernel = candidate.kernel
            runs = candidate.verdict in ("selected", "eligible", "unverified") and kernel.language != "python"
            if runs and kernel.name != entry.kernel and len(found) <= others:
                layout = next((name for name in kernel.layouts if name in (layouts or ())), None)
                found.append(Choice(kernel, dict(candidate.config or {}), layout, "other", largest))
        return found

    def configurations(self, op: Op, problem: Problem, name: str) -> list[Choice]:
        """Every configuration of a kernel, its default one if it has no others, whatever it was verified for; none where it cannot run."""
        kernel = next((one for one in default_registry().all_kernels() if one.name == name), None)
        resolver = self.plans.resolver
        if kernel is None or kernel.op != op.name or kernel.why_not(problem, resolver.target, resolver.build):
            return []
        space = kernel.space(problem, resolver.target) if kernel.space else ()
        configs = list(space) or [kernel.config(problem, resolver.target)]
        layout, largest = next(iter(kernel.layouts), None), _largest(op, problem)
        return [Choice(kernel, dict(config), layout, "configuration", largest) for config in configs]


def _largest(op: Op, problem: Problem) -> Problem:
    """The largest problem that the plan of a layer serves as it serves this one."""
    size = problem.integer(op.bucket) if op.bucket else 1
    bucket = bucket_index(size)
    bound = BUCKETS[bucket] if bucket < len(BUCKETS) else cdiv(size, LARGE_STEP) * LARGE_STEP
    return op.at_bucket(op.static(problem), bound)


def _packed(layout: str | None, problem: Problem, arguments: Arguments) -> Arguments:
    return [
        pack(argument, layout).tensors if layout and isinstance(argument, QuantTensor) else argument
        for argument in arguments
    ]


def _bind(
    op: Op,
    choice: Choice,
    workspace: Callable[[torch.device], torch.Tensor | None],
    output: Callable[[int, tuple[int, ...], torch.dtype, torch.device], torch.Tensor],
    problem: Problem,
    arguments: Arguments,
) -> Run:
    launch, device = load(choice.kernel), next(a.device for a in arguments if isinstance(a, torch.Tensor))
    like = op.like(*arguments) if op.outputs else ()
    outs = [output(place, tuple(shape), dtype, device) for place, (shape, dtype) in enumerate(like)]
    call = op.Call(*arguments, *outs)
    if "workspace" in op.Call.names:
        call.workspace = workspace(device)

    def run() -> list[torch.Tensor]:
        launch(choice.config, call)
        return outs

    return run


def _poisoned(place: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The output at a place of a call, which holds nothing that is right."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=device)


def _outputs(op: Op, arguments: Arguments, result: Any) -> list[torch.Tensor]:
    return [*result, *written(op, arguments)]
