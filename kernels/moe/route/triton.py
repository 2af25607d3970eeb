"""Route in Triton: grouped_topk_triton and permute_triton, four launches, five on a rank that does not have the first expert."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_topk import triton as grouped_topk_triton
from gristmill.kernels.moe.permute import triton as permute_triton
from gristmill.kernels.moe.route._chain import run

if TYPE_CHECKING:
    from gristmill.kernels.calls import RouteCall


def launch(config: Config, call: RouteCall) -> None:
    """logits [M, E] -> weights, ids [M, top_k], expert_offsets [local + 1], permutation and inverse [M * top_k]."""
    run(call, partial(grouped_topk_triton.launch, config), partial(permute_triton.launch, {}))


def config(problem: Problem, target: Target) -> Config:
    """That of grouped_topk_triton."""
    return grouped_topk_triton.config(problem, target)


KERNEL = Kernel(
    op="route",
    name="route_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    requires=Requirement(code="triton"),
    summary="grouped_topk_triton, permute_triton; 4 launches",
    config=config,
    batch_invariant=True,
    priority=50,
)
