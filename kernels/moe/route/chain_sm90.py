"""Route on Hopper for any number of tokens: grouped_topk_sm90 and permute_sm90."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe import steps_sm90
from gristmill.kernels.moe.grouped_topk import sm90 as grouped_topk
from gristmill.kernels.moe.route._chain import run

if TYPE_CHECKING:
    from gristmill.kernels.calls import RouteCall


def launch(config: Config, call: RouteCall) -> None:
    """logits [M, E] -> weights, ids [M, top_k], expert_offsets [local + 1], permutation and inverse [M * top_k]."""
    run(call, partial(grouped_topk.launch, config), partial(steps_sm90.permute, {}))


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    sorting = problem.with_values(e=problem.integer("local"))
    return grouped_topk.KERNEL.accepts(problem) or steps_sm90.accepts_permute(sorting)


def config(problem: Problem, target: Target) -> Config:
    """That of grouped_topk_sm90."""
    return grouped_topk.KERNEL.config(problem, target)


KERNEL = Kernel(
    op="route",
    name="route_chain_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="grouped_topk_sm90, permute_sm90; 2 launches",
    accepts=accepts,
    config=config,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=60,
)
