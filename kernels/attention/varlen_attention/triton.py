"""Launcher of attention over dense sequences in Triton: `flash_kernel` without a block table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.attention._flash_triton import flash_case, flash_kernel
from gristmill.kernels.attention.tiles import packing, power_of_two, tile_bound, tile_config

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_HEAD = 256


def accepts(problem: Problem) -> str | None:
    """Heads of up to 256 elements: wider ones do not fit in registers."""
    widest = max(problem.integer("qk_dim"), problem.integer("v_dim"))
    return f"heads of {widest} elements are over {LARGEST_HEAD}" if widest > LARGEST_HEAD else None


def config(problem: Problem, target: Target) -> Config:
    """One tile size for every batch, so that a row is always computed in the same steps."""
    return tile_config(
        problem.integer("qk_dim"),
        problem.integer("v_dim"),
        problem.text("x"),
        32 if problem.text("x") == "fp32" else 64,
        target,
    )


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
    tokens, heads, dk = q.shape
    if tokens == 0:
        return
    kv_heads, dv, rows = k.shape[1], v.shape[2], int(config["m"])
    head_tiles, tile_q = packing(heads // kv_heads, rows)
    seqs = query_start.shape[0] - 1
    lse_out = out if lse is None else lse
    flash_kernel[(tile_bound(tokens, seqs, tile_q), kv_heads * head_tiles, 1)](
        q,
        k,
        v,
        out,
        lse_out,
        out,
        context_start,
        query_start,
        context_start,
        context_start,
        *(out,) * 4,
        seqs,
        tokens,
        heads,
        scale,
        0.0,
        0,
        0,
        0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        0,
        k.stride(0),
        k.stride(1),
        0,
        v.stride(0),
        v.stride(1),
        *(0,) * 6,
        GROUP=heads // kv_heads,
        HEAD_TILES=head_tiles,
        BLOCK_SIZE=1,
        DK=dk,
        DV=dv,
        BLOCK_DK=power_of_two(dk),
        BLOCK_DV=power_of_two(dv),
        BLOCK_M=rows,
        BLOCK_N=config["n"],
        PAGED=False,
        WINDOW=False,
        SINKS=False,
        LSE=lse is not None,
        SPLIT=False,
        FP8=False,
        TOKEN_SCALES=False,
        NATIVE=False,
        SOFTCAP=False,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: the un-absorbed MLA prefill."""
    return [flash_case("mla_prefill", target, 64, 192, 128, 1, paged=False, lse=True)]


KERNEL = Kernel(
    op="varlen_attention",
    name="varlen_attention_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="a tile of queries of a head at a time, one pass over the context",
    accepts=accepts,
    config=config,
    batch_invariant=True,
    priority=50,
)
