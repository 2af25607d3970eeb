"""Merging partial attentions in C++ for CPUs (`_merge_attention_states_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import MergeAttentionStatesCall

ENTRY = CallEntry("gm_merge_attention_states", "merge_attention_states")


def launch(config: Config, call: MergeAttentionStatesCall) -> None:
    """a, b [T, H, D] with a_lse, b_lse [T, H] -> out [T, H, D], lse [T, H]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="merge_attention_states",
    name="merge_attention_states_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="rows over threads, elements over lanes, float32 inside",
    config=best_config("gm_merge_attention_states"),
    batch_invariant=True,
    priority=100,
)
