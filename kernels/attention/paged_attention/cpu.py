"""Paged attention in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.attention.cpu_call import attend
from gristmill.kernels.native import best_config

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall


def launch(config: Config, call: PagedAttentionCall) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    attend(
        "paged_attention_cpu",
        config["level"],
        call.q,
        call.k_cache,
        call.v_cache,
        call.block_table,
        call.query_start,
        call.seq_lens,
        call.scale,
        call.window,
        call.sinks,
        call.lse,
        call.out,
        call.k_scale,
        call.v_scale,
        call.softcap,
    )


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tiles of 64 keys, read in place for few rows, widened once for many; float32 inside",
    config=best_config("gm_attention"),
    batch_invariant=True,
    priority=100,
)
