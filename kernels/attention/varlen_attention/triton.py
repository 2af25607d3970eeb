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
    from gristmill.kernels.calls import VarlenAttentionCall

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


def launch(config: Config, call: VarlenAttentionCall) -> None:
    """The arguments of `varlen_attention.reference`, then out [tokens, heads, Dv]."""
    tokens, heads, dk = call.q.shape
    if tokens == 0:
        return
    kv_heads, dv, rows = call.k.shape[1], call.v.shape[2], int(config["m"])
    head_tiles, tile_q = packing(heads // kv_heads, rows)
    seqs = call.query_start.shape[0] - 1
    lse_out = call.out if call.lse is None else call.lse
    flash_kernel[(tile_bound(tokens, seqs, tile_q), kv_heads * head_tiles, 1)](
        call.q,
        call.k,
        call.v,
        call.out,
        lse_out,
        call.out,
        call.context_start,
        call.query_start,
        call.context_start,
        call.context_start,
        *(call.out,) * 4,
        seqs,
        tokens,
        heads,
        call.scale,
        0.0,
        min(call.window_left, call.max_ctx) + 1,  # no sum of a position and a bound overflows int32
        call.max_ctx if call.window_right < 0 else min(call.window_right, call.max_ctx),
        0,
        0,
        call.q.stride(0),
        call.q.stride(1),
        call.out.stride(0),
        call.out.stride(1),
        0,
        call.k.stride(0),
        call.k.stride(1),
        0,
        call.v.stride(0),
        call.v.stride(1),
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
        WINDOW=call.window_left >= 0,
        AHEAD=call.window_right != 0,
        SINKS=False,
        LSE=call.lse is not None,
        SPLIT=False,
        FP8=False,
        TOKEN_SCALES=False,
        NATIVE=False,
        SOFTCAP=False,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: the un-absorbed MLA prefill, and an encoder with windows on both sides."""
    return [
        flash_case("mla_prefill", target, 64, 192, 128, 1, paged=False, lse=True),
        flash_case("encoder", target, 64, 64, 64, 1, paged=False, window=True, ahead=True),
    ]


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
    supports=("window_left", "window_right"),
    priority=50,
)
