"""Attention over dense sequences in C++ for CPUs (`_attention_cpu.cpp`), compiled for every ISA level."""

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
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    context_start: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    lse: Tensor | None,
    out: Tensor,
) -> None:
    """The arguments of `varlen_attention.reference`, then out [tokens, heads, Dv]."""
    attend(
        "varlen_attention_cpu",
        config["level"],
        q,
        k[None],
        v[None],
        None,
        query_start,
        context_start,
        scale,
        0,
        None,
        lse,
        out,
    )


KERNEL = Kernel(
    op="varlen_attention",
    name="varlen_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tiles of 64 keys, read in place for few rows, widened once for many; float32 inside",
    config=best_config("gm_attention"),
    batch_invariant=True,
    priority=100,
)
