"""Paged attention in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.attention.cpu_call import attend
from gristmill.kernels.native import best_config

if TYPE_CHECKING:
    from torch import Tensor


def launch(
    config: Config,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softcap: float,
    out: Tensor,
) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    attend(
        "paged_attention_cpu",
        config["level"],
        q,
        k_cache,
        v_cache,
        block_table,
        query_start,
        seq_lens,
        scale,
        window,
        sinks,
        lse,
        out,
        k_scale,
        v_scale,
        softcap,
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
