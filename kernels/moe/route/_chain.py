"""Route as its two operations, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gristmill.kernels.moe.grouped_topk.op import OP as GROUPED_TOPK
from gristmill.kernels.moe.permute.op import OP as PERMUTE

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall, PermuteCall, RouteCall


def run(
    call: RouteCall, choose: Callable[[GroupedTopkCall], None], sort: Callable[[PermuteCall], None]
) -> None:
    """Both steps; between them `first` is subtracted from the ids, by an operation of torch."""
    choose(
        GROUPED_TOPK.Call(
            call.logits,
            call.top_k,
            call.bias,
            call.n_group,
            call.topk_group,
            call.scoring,
            call.renormalize,
            call.scale,
            call.weights,
            call.ids,
        )
    )
    if call.first:
        call.ids.sub_(call.first)
    sort(PERMUTE.Call(call.ids, call.local, call.expert_offsets, call.permutation, call.inverse))
