"""Latent attention in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.attention.cpu_call import attend
from gristmill.kernels.native import best_config

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall


def launch(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim]."""
    rows = call.cache[:, :, None]
    attend(
        "mla_attention_cpu",
        config["level"],
        call.q,
        rows,
        rows[..., : call.latent_dim],
        call.block_table,
        call.query_start,
        call.seq_lens,
        call.scale,
        0,
        None,
        call.lse,
        call.out,
    )


KERNEL = Kernel(
    op="mla_attention",
    name="mla_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tiles of 64 keys, read in place for few rows, widened once for many; float32 inside",
    config=best_config("gm_attention"),
    batch_invariant=True,
    priority=100,
)
