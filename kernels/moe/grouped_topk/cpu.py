"""Grouped top-k in C++ for CPUs (`_grouped_topk_cpu.cpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall

ENTRY = CallEntry("gm_grouped_topk", "grouped_topk")


def launch(config: Config, call: GroupedTopkCall) -> None:
    """logits [..., E] -> weights, ids [..., top_k]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="grouped_topk",
    name="grouped_topk_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="scores by vectors, then repeated maximum of integer keys",
    config=best_config("gm_grouped_topk"),
    batch_invariant=True,
    priority=100,
)
