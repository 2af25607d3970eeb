"""Route in one launch on Hopper, for up to 64 tokens (`_order.cuh`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.grouped_topk import _cuda as grouped_topk
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import RouteCall

ENTRY = CallEntry("gm_route_sm90", "route")
MOST_TOKENS = 64
MOST_PLACES = 32
"""A lane has one of a token's experts."""


def launch(config: Config, call: RouteCall) -> None:
    """logits [M, E] -> weights, ids [M, top_k], expert_offsets [local + 1], permutation and inverse [M * top_k]."""
    ENTRY.cuda(config, call, call.logits.get_device())


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    m, top_k = problem.integers("m", "top_k")
    if m > MOST_TOKENS:
        return f"sorts up to {MOST_TOKENS} tokens in a cluster, not {m}"
    if top_k > MOST_PLACES:
        return f"chooses up to {MOST_PLACES} experts per token, not {top_k}"
    return grouped_topk.accepts(problem)


KERNEL = Kernel(
    op="route",
    name="route_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="a warp per token as of grouped_topk_sm90; a bit per token and expert in all CTAs of a cluster gives the order; 1 launch",
    accepts=accepts,
    examples=(
        "m=0,e=256,local=256,top_k=8",
        "m=1,e=256,local=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true",
        "m=3,e=1024,local=1024,top_k=32,n_group=32,topk_group=3,scoring=sigmoid,bias=true",
        "m=7,e=257,local=100,top_k=8,x=bf16",
        "m=63,e=160,local=20,top_k=6,n_group=8,topk_group=3,x=fp16,scoring=sigmoid",
        "m=64,e=1000,local=999,top_k=13",
    ),
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=62,
)
