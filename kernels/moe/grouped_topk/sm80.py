"""Grouped top-k in CUDA C++ for every GPU of NVIDIA from sm_80 on (`_grouped_topk_sm80.cu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.cuda_ptx_call import PtxCallEntry
from gristmill.kernels.moe.grouped_topk._cuda import kernel

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall

ENTRY = PtxCallEntry("gm_grouped_topk_sm80", "grouped_topk")


def launch(config: Config, call: GroupedTopkCall) -> None:
    """logits [..., E] -> weights, ids [..., top_k]."""
    ENTRY.cuda(config, call, call.logits.get_device())


KERNEL = kernel(
    __name__,
    "grouped_topk_sm80",
    Requirement(vendors=("nvidia",), code="cuda:compute_80"),
    priority=58,
)
