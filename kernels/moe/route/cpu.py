"""Route in C++ for CPUs: grouped_topk_cpu and permute_cpu."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_topk import cpu as grouped_topk
from gristmill.kernels.moe.permute import cpu as permute
from gristmill.kernels.moe.route._chain import run

if TYPE_CHECKING:
    from gristmill.kernels.calls import RouteCall


def launch(config: Config, call: RouteCall) -> None:
    """logits [M, E] -> weights, ids [M, top_k], expert_offsets [local + 1], permutation and inverse [M * top_k]."""
    order = {"level": config["order_level"]}
    run(call, partial(grouped_topk.launch, config), partial(permute.launch, order))


def config(problem: Problem, target: Target) -> Config:
    """The code levels of both."""
    order = permute.KERNEL.config(problem, target)
    return {**grouped_topk.KERNEL.config(problem, target), "order_level": order["level"]}


KERNEL = Kernel(
    op="route",
    name="route_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="grouped_topk_cpu, permute_cpu",
    config=config,
    batch_invariant=True,
    priority=100,
)
