"""Launchers of paged attention in Triton: one pass over the context, or the context split in parts and merged."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.attention._flash_triton import flash_kernel, merge_kernel
from gristmill.kernels.attention.tiles import (
    packing,
    part_length,
    power_of_two,
    split_count,
    tile_bound,
    tile_config,
)


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
    out: Tensor,
    splits: int = 1,
) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    _, block_size, kv_heads, _ = k_cache.shape
    rows, step = int(config["m"]), int(config["n"])
    head_tiles, tile_q = packing(heads // kv_heads, rows)
    seqs = seq_lens.shape[0]
    parts = parts_lse = out
    if splits > 1:
        parts, parts_lse = scratch(workspace, splits * tokens * heads, dim, q.device)
    flags = {"SINKS": sinks is not None, "LSE": lse is not None}
    sinks, lse = out if sinks is None else sinks, out if lse is None else lse
    grid = (tile_bound(tokens, seqs, tile_q), kv_heads * head_tiles, splits)
    flash_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        lse,
        sinks,
        block_table,
        query_start,
        seq_lens,
        seq_lens,
        parts,
        parts_lse,
        seqs,
        tokens,
        heads,
        scale,
        window,
        part_length(reach(max_q, max_ctx, window), splits, step),
        block_table.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
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
        WINDOW=window > 0,
        SPLIT=splits > 1,
        **flags,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )
    if splits > 1:
        merge_kernel[(tokens, heads)](
            out,
            lse,
            sinks,
            parts,
            parts_lse,
            tokens,
            heads,
            splits,
            out.stride(0),
            out.stride(1),
            DV=dim,
            BLOCK_DV=power_of_two(dim),
            **flags,
            num_warps=1 if dim <= 128 else 4,
        )


def launch_split(
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
    out: Tensor,
) -> None:
    """As `launch`; decode batches run in small tiles with the context split when there are few of them.

    What is chosen follows from host-known bounds, so a captured graph replays what was captured.
    """
    kv_heads = k_cache.shape[2]
    group, rows = q.shape[1] // kv_heads, int(config["decode_m"])
    few = max_q * group <= rows or max_q == 1
    if not few:
        launch(
            config,
            q,
            k_cache,
            v_cache,
            block_table,
            query_start,
            seq_lens,
            max_q,
            max_ctx,
            scale,
            window,
            sinks,
            lse,
            workspace,
            out,
        )
        return
    small = {"m": rows, "n": config["decode_n"], "warps": config["decode_warps"], "stages": config["stages"]}
    head_tiles, _ = packing(group, rows)
    splits = split_count(
        seq_lens.shape[0] * kv_heads * head_tiles, int(config["programs"]), reach(max_q, max_ctx, window)
    )
    launch(
        small,
        q,
        k_cache,
        v_cache,
        block_table,
        query_start,
        seq_lens,
        max_q,
        max_ctx,
        scale,
        window,
        sinks,
        lse,
        workspace,
        out,
        splits=splits,
    )


def reach(max_q: int, max_ctx: int, window: int) -> int:
    """Keys that one tile can see at most."""
    return min(max_ctx, window + max_q) if window > 0 else max_ctx


def scratch(
    workspace: Tensor | None, rows: int, dim: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(results [rows, dim], log-sum-exps [rows]) in float32, in the caller's workspace or in fresh memory without one.

    ValueError if the workspace is too small.
    """
    floats = rows * (dim + 1)
    if workspace is None:
        space = torch.empty(floats, dtype=torch.float32, device=device)
    else:
        if workspace.numel() * workspace.element_size() < floats * 4:
            raise ValueError(
                f"attention needs a workspace of {floats * 4} bytes here, got {workspace.numel() * workspace.element_size()}"
            )
        space = workspace.view(torch.uint8)[: floats * 4].view(torch.float32)
    return space[: rows * dim], space[rows * dim :]


SIGNATURE = {
    **dict.fromkeys(("q", "k", "v", "out"), "*bf16"),
    **dict.fromkeys(("lse", "sinks"), "*fp32"),
    **dict.fromkeys(("table", "query_start", "seq_lens", "context_start"), "*i32"),
    **dict.fromkeys(("parts", "parts_lse"), "*fp32"),
    **dict.fromkeys(("seqs", "tokens", "heads"), "i32"),
    "scale": "fp32",
    **dict.fromkeys(
        ("window", "part_length", "table_stride", "q_token", "q_head", "out_token", "out_head"), "i32"
    ),
    **dict.fromkeys(("k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head"), "i32"),
}
ALIGNED = (
    "q",
    "k",
    "v",
    "out",
    "lse",
    "parts",
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    "k_block",
    "k_slot",
    "k_head",
    "v_block",
    "v_slot",
    "v_head",
)
MERGE_SIGNATURE = {
    "out": "*bf16",
    **dict.fromkeys(("lse", "sinks", "parts", "parts_lse"), "*fp32"),
    **dict.fromkeys(("tokens", "heads", "count", "out_token", "out_head"), "i32"),
}


def flash_case(
    name: str,
    target: Target,
    rows: int,
    dk: int,
    dv: int,
    group: int = 4,
    dtype: str = "bf16",
    paged: bool = True,
    window: bool = False,
    sinks: bool = False,
    lse: bool = False,
    split: bool = False,
) -> AotCase:
    """One compilation of `flash_kernel`, tiled as the launchers tile it for `target`."""
    config = tile_config(dk, dv, dtype, rows, target)
    constants = {
        "GROUP": group,
        "HEAD_TILES": packing(group, rows)[0],
        "BLOCK_SIZE": 16,
        "DK": dk,
        "DV": dv,
        "BLOCK_DK": power_of_two(dk),
        "BLOCK_DV": power_of_two(dv),
        "BLOCK_M": rows,
        "BLOCK_N": config["n"],
        "PAGED": paged,
        "WINDOW": window,
        "SINKS": sinks,
        "LSE": lse,
        "SPLIT": split,
    }
    signature = SIGNATURE | dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}")
    options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
    promises = () if dtype == "fp32" else matrix_product(target, rows)
    return AotCase(name, flash_kernel, signature, constants, options, ALIGNED, promises)


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: prefill tiles of common head sizes and all switches."""
    return [
        flash_case("d128", target, 64, 128, 128),
        flash_case("d64_sinks_window_lse", target, 64, 64, 64, 8, window=True, sinks=True, lse=True),
        flash_case("d80_fp32", target, 64, 80, 80, 1, dtype="fp32"),
        flash_case("d256", target, 64, 256, 256, 2),
    ]


def aot_split(target: Target) -> list[AotCase]:
    """Decode tiles with a split context, and the merge."""
    merge = {"DV": 128, "BLOCK_DV": 128, "SINKS": True, "LSE": True}
    return [
        flash_case("d128", target, 16, 128, 128, 4, split=True),
        flash_case("d256", target, 16, 256, 256, 8, split=True),
        flash_case("prefill_d128", target, 128, 128, 128, 4),
        AotCase("merge", merge_kernel, MERGE_SIGNATURE, merge, {"num_warps": 1}, ("out", "lse", "parts")),
    ]
