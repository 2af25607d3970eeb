"""Latent attention in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall


ENTRY = CallEntry("gm_mla_attention", "mla_attention")


def launch(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="mla_attention",
    name="mla_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tiles of 64 keys, read in place for few rows, widened once for many; float32 inside",
    config=best_config("gm_mla_attention"),
    batch_invariant=True,
    priority=100,
)
