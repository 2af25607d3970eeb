"""Paged attention in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall


ENTRY = CallEntry("gm_paged_attention", "paged_attention")


def launch(config: Config, call: PagedAttentionCall) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tiles of 64 keys, read in place for few rows, widened once for many; float32 inside",
    config=best_config("gm_paged_attention"),
    batch_invariant=True,
    priority=100,
)
