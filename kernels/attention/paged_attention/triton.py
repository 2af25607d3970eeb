"""Launchers of paged attention in Triton: one pass over the context, or the context split in parts and merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.attention._flash_triton import (
    MERGE_SIGNATURE,
    flash_case,
    flash_kernel,
    merge_kernel,
    partial_results,
)
from gristmill.kernels.attention.tiles import (
    DEFAULT_MULTIPROCESSORS,
    packing,
    part_length,
    power_of_two,
    reach,
    split_count,
    tile_bound,
    tile_config,
)
from gristmill.kernels.kv_cache._e4m3_triton import has_e4m3
from gristmill.kernels.kv_cache.quantized import as_bytes, by_token, scale_strides

if TYPE_CHECKING:
    from gristmill.kernels.calls import PagedAttentionCall

LARGEST_HEAD = 256


def accepts(problem: Problem) -> str | None:
    """Heads of up to 256 elements: wider ones do not fit in registers."""
    dim = problem.integer("head_dim")
    return f"head_dim {dim} is over {LARGEST_HEAD}" if dim > LARGEST_HEAD else None


def decoding(problem: Problem, target: Target) -> Config:
    """Whether e4m3 codes of the caches are decoded by an instruction of the target; {} for caches of q's dtype."""
    return {} if problem["kv"] == "x" else {"native": has_e4m3(target)}


def config(problem: Problem, target: Target) -> Config:
    """One tile size for every batch, so that a row is always computed in the same steps."""
    dim, x = problem.integer("head_dim"), problem.text("x")
    tile = tile_config(dim, dim, x, 32 if x == "fp32" or dim > 128 else 64, target)
    return {**tile, **decoding(problem, target)}


def split_config(problem: Problem, target: Target) -> Config:
    """Large tiles for prefill; for decode the smallest that tensor cores take, and enough programs to fill the device."""
    dim, x = problem.integer("head_dim"), problem.text("x")
    decode = tile_config(dim, dim, x, 16, target)
    prefill = tile_config(dim, dim, x, 32 if x == "fp32" else 64 if dim > 128 else 128, target)
    return {
        **prefill,
        "decode_m": 16,
        "decode_n": decode["n"],
        "decode_warps": decode["warps"],
        "programs": 4 * (target.multiprocessors or DEFAULT_MULTIPROCESSORS),
        **decoding(problem, target),
    }


def split_space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles and warps around the default."""
    base = split_config(problem, target)
    configs = []
    for rows, keys, warps in ((128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 32, 4)):
        for decode_keys, decode_warps in ((32, 2), (64, 4), (128, 4)):
            for programs in (2, 4, 8):
                configs.append(
                    {
                        **base,
                        "m": rows,
                        "n": keys,
                        "warps": warps,
                        "decode_n": decode_keys,
                        "decode_warps": decode_warps,
                        "programs": programs * (target.multiprocessors or DEFAULT_MULTIPROCESSORS),
                    }
                )
    return configs


def split_workspace(problem: Problem, config: Config) -> Workspace:
    """Partial results of the parts, for the worst-case sequences and lengths of the problem's tokens.

    A call of t tokens has at least t / tile_q sequences, which limits the number of splits, so both terms bound tokens · splits.
    """
    heads, kv_heads = problem.integer("heads"), problem.integer("kv_heads")
    head_tiles, tile_q = packing(heads // kv_heads, int(config["decode_m"]))
    rows = problem.integer("q_tokens") + int(config["programs"]) * tile_q // (kv_heads * head_tiles)
    return Workspace(rows * heads * (problem.integer("head_dim") + 1) * 4)


def launch(config: Config, call: PagedAttentionCall, splits: int = 1) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    k_cache, v_cache, sinks, lse = call.k_cache, call.v_cache, call.sinks, call.lse
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    _, block_size, kv_heads, _ = k_cache.shape
    rows, step = int(config["m"]), int(config["n"])
    head_tiles, tile_q = packing(heads // kv_heads, rows)
    seqs = call.seq_lens.shape[0]
    parts = parts_lse = call.out
    if splits > 1:
        parts, parts_lse = partial_results(call.workspace, splits * tokens * heads, dim, call.q.device)
    flags = {"SINKS": sinks is not None, "LSE": lse is not None}
    sinks, lse = call.out if sinks is None else sinks, call.out if lse is None else lse
    fp8 = call.k_scale is not None
    if fp8:
        k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    grid = (tile_bound(tokens, seqs, tile_q), kv_heads * head_tiles, splits)
    flash_kernel[grid](
        call.q,
        k_cache,
        v_cache,
        call.out,
        lse,
        sinks,
        call.block_table,
        call.query_start,
        call.seq_lens,
        call.seq_lens,
        parts,
        parts_lse,
        call.out if call.k_scale is None else call.k_scale,
        call.out if call.v_scale is None else call.v_scale,
        seqs,
        tokens,
        heads,
        call.scale,
        call.softcap,
        call.window,
        0,
        part_length(reach(call.max_q, call.max_ctx, call.window), splits, step),
        call.block_table.stride(0),
        call.q.stride(0),
        call.q.stride(1),
        call.out.stride(0),
        call.out.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(call.k_scale),
        *scale_strides(call.v_scale),
        GROUP=heads // kv_heads,
        HEAD_TILES=head_tiles,
        BLOCK_SIZE=block_size,
        DK=dim,
        DV=dim,
        BLOCK_DK=power_of_two(dim),
        BLOCK_DV=power_of_two(dim),
        BLOCK_M=rows,
        BLOCK_N=step,
        PAGED=True,
        WINDOW=call.window > 0,
        AHEAD=False,
        SPLIT=splits > 1,
        FP8=fp8,
        TOKEN_SCALES=call.k_scale is not None and by_token(call.k_scale),
        NATIVE=fp8 and config["native"],
        SOFTCAP=call.softcap > 0,
        **flags,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )
    if splits > 1:
        merge_kernel[(tokens, heads)](
            call.out,
            lse,
            sinks,
            parts,
            parts_lse,
            tokens,
            heads,
            splits,
            call.out.stride(0),
            call.out.stride(1),
            DV=dim,
            BLOCK_DV=power_of_two(dim),
            **flags,
            num_warps=1 if dim <= 128 else 4,
        )


def launch_split(config: Config, call: PagedAttentionCall) -> None:
    """As `launch`; decode batches run in small tiles, and small ones split the context.

    The choice follows from host-known bounds, so that a captured graph replays the same launch.
    """
    kv_heads, seqs = call.k_cache.shape[2], call.seq_lens.shape[0]
    group, rows = call.q.shape[1] // kv_heads, int(config["decode_m"])
    if call.max_q * group > rows and call.max_q > 1:
        launch(config, call)
        return
    small = {**config, "m": rows, "n": config["decode_n"], "warps": config["decode_warps"]}
    head_tiles, _ = packing(group, rows)
    keys = reach(call.max_q, call.max_ctx, call.window)
    launch(small, call, split_count(seqs * kv_heads * head_tiles, int(config["programs"]), keys))


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: prefill tiles of common head sizes and all switches."""
    return [
        flash_case("d128", target, 64, 128, 128),
        flash_case("d64_sinks_window_lse", target, 64, 64, 64, 8, window=True, sinks=True, lse=True),
        flash_case("d80_fp32", target, 64, 80, 80, 1, dtype="fp32"),
        flash_case("d256", target, 64, 256, 256, 2),
        flash_case("d128_fp8", target, 64, 128, 128, kv_scale="head"),
        flash_case("d256_softcap_window", target, 64, 256, 256, 2, window=True, softcap=True),
    ]


def aot_split(target: Target) -> list[AotCase]:
    """Decode tiles with a split context, and the merge."""
    merge = {"DV": 128, "BLOCK_DV": 128, "SINKS": True, "LSE": True}
    return [
        flash_case("d128", target, 16, 128, 128, 4, split=True),
        flash_case("d256", target, 16, 256, 256, 8, split=True),
        flash_case("prefill_d128", target, 128, 128, 128, 4),
        flash_case("d128_fp8", target, 16, 128, 128, 4, split=True, kv_scale="head"),
        flash_case("d64_fp8_token", target, 16, 64, 64, 8, dtype="fp16", split=True, kv_scale="token"),
        flash_case("d128_fp8_softcap", target, 16, 128, 128, 4, split=True, kv_scale="head", softcap=True),
        AotCase("merge", merge_kernel, MERGE_SIGNATURE, merge, {"num_warps": 1}, ("out", "lse", "parts")),
    ]


KERNELS = (
    Kernel(
        op="paged_attention",
        name="paged_attention_triton",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot",
        requires=Requirement(code="triton"),
        summary="a tile of queries and the heads of a KV head at a time, one pass over the context",
        accepts=accepts,
        config=config,
        batch_invariant=True,
        priority=50,
    ),
    Kernel(
        op="paged_attention",
        name="paged_attention_triton_split",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch_split",
        aot=f"{__name__}:aot_split",
        requires=Requirement(code="triton"),
        summary="as paged_attention_triton; decode splits the context over programs and merges",
        accepts=accepts,
        config=split_config,
        space=split_space,
        workspace=split_workspace,
        priority=55,
    ),
)
