"""Grouped top-k in CUDA C++ for Hopper (`_grouped_topk_sm90.cu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.grouped_topk._cuda import kernel
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall

ENTRY = CallEntry("gm_grouped_topk_sm90", "grouped_topk")


def launch(config: Config, call: GroupedTopkCall) -> None:
    """logits [..., E] -> weights, ids [..., top_k]."""
    ENTRY.cuda(config, call, call.logits.get_device())


KERNEL = kernel(
    __name__,
    "grouped_topk_sm90",
    Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    priority=60,
    overlaps=True,
)
