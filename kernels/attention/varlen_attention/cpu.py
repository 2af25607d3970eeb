"""Attention over dense sequences in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import VarlenAttentionCall


ENTRY = CallEntry("gm_varlen_attention", "varlen_attention")


def launch(config: Config, call: VarlenAttentionCall) -> None:
    """The arguments of `varlen_attention.reference`, then out [tokens, heads, Dv]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="varlen_attention",
    name="varlen_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tiles of 64 keys, read in place for few rows, widened once for many; float32 inside",
    config=best_config("gm_varlen_attention"),
    batch_invariant=True,
    supports=("window_left", "window_right"),
    priority=100,
)
