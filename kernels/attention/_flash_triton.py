"""Attention with an online softmax in Triton, shared by the attention launchers: paged or dense keys, grouped heads.

One program takes a tile of rows of one KV head: consecutive query tokens times the query heads that share it, packed in M.
Programs find their sequence by bisection over query_start, so one launch serves any mix of prefill and decode (the scheme of vLLM's
unified Triton attention); with SPLIT the context is divided into parts whose partial results `merge_kernel` combines by their
log-sum-exps (Flash-Decoding, Dao et al., 2023). Scores are kept in units of log 2, so that exp2 is the only exponential.
Keys and values in e4m3 are decoded exactly; their scales multiply scores, weights, or the result, never a key or a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.attention.tiles import packing, power_of_two, tile_config
from gristmill.kernels.kv_cache._e4m3_triton import e4m3_decode, has_e4m3
from gristmill.kernels.lazy_triton import constexpr, jit, tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOG2E = constexpr(1.4426950408889634)
LN2 = constexpr(0.6931471805599453)


@jit
def find_sequence(query_start, seqs, tile, TILE_Q: tl.constexpr):
    """The sequence of tile number `tile`: the tiles of sequence i start at query_start[i] // TILE_Q + i."""
    low = 0
    high = seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TILE_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def soft_cap(scores, softcap):
    """softcap · tanh(s / softcap) of scores s in units of log 2: 1 - 2 / (1 + e^2x), or near 0, where that loses digits, the
    first terms of the series."""
    x = scores * (LN2 / softcap)
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    whole = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(tl.abs(x) < 0.3, series, whole) * (softcap * LOG2E)


# Sizes of the batch differ from step to step: without this, Triton would compile again for 1 and for multiples of 16.
@jit(do_not_specialize=["seqs", "tokens", "part_length", "table_stride"])  # type: ignore[call-arg, untyped-decorator]
def flash_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
    sinks,
    table,
    query_start,
    seq_lens,
    context_start,
    parts,
    parts_lse,
    k_scale,
    v_scale,
    seqs,
    tokens,
    heads,
    scale,
    softcap,
    window,
    ahead,
    part_length,
    table_stride,
    q_token,
    q_head,
    out_token,
    out_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    k_scale_block,
    k_scale_slot,
    k_scale_head,
    v_scale_block,
    v_scale_slot,
    v_scale_head,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    HEADS: tl.constexpr = (GROUP + HEAD_TILES - 1) // HEAD_TILES
    TILE_Q: tl.constexpr = BLOCK_M // HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    sequence = find_sequence(query_start, seqs, tile, TILE_Q)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    offset = (tile - (begin // TILE_Q + sequence)) * TILE_Q
    if offset < count:
        if PAGED:
            context = tl.load(seq_lens + sequence)
        else:
            context = tl.load(context_start + sequence + 1) - tl.load(context_start + sequence)
        first = context - count + offset
        rows = tl.arange(0, BLOCK_M)
        query = rows // HEADS
        group_head = head_tile * HEADS + rows % HEADS
        live = (query < TILE_Q) & (offset + query < count) & (group_head < GROUP)
        token = (begin + offset + query).to(tl.int64)
        head = kv_head * GROUP + group_head
        query_position = first + query
        dk = tl.arange(0, BLOCK_DK)
        dv = tl.arange(0, BLOCK_DV)
        q_at = q + token[:, None] * q_token + head[:, None] * q_head + dk[None, :]
        queries = tl.load(q_at, mask=live[:, None] & (dk < DK)[None, :], other=0.0)

        end = tl.minimum(context, first + TILE_Q)
        if AHEAD:
            end = tl.minimum(context, first + TILE_Q + ahead)
        low = 0
        if WINDOW:
            low = tl.maximum(0, first - window + 1)
        if SPLIT:
            part = tl.program_id(2)
            low += part * part_length
            end = tl.minimum(end, low + part_length)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        k += kv_head.to(tl.int64) * k_head
        v += kv_head.to(tl.int64) * v_head
        if FP8:
            k_scale += kv_head.to(tl.int64) * k_scale_head
            v_scale += kv_head.to(tl.int64) * v_scale_head
            if not TOKEN_SCALES:
                scale *= tl.load(k_scale)
        for start in range(low // BLOCK_N * BLOCK_N, end, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            in_context = (position < end) & (position >= low)
            if PAGED:
                block = tl.load(
                    table + sequence.to(tl.int64) * table_stride + position // BLOCK_SIZE,
                    mask=in_context,
                    other=0,
                )
                k_row = block.to(tl.int64) * k_block + (position % BLOCK_SIZE) * k_slot
                v_row = block.to(tl.int64) * v_block + (position % BLOCK_SIZE) * v_slot
            else:
                slot = (tl.load(context_start + sequence) + position).to(tl.int64)
                k_row = slot * k_slot
                v_row = slot * v_slot
            keys = tl.load(
                k + k_row[None, :] + dk[:, None], mask=in_context[None, :] & (dk < DK)[:, None], other=0.0
            )
            if FP8:
                keys = e4m3_decode(keys, queries.dtype, NATIVE)
            scores = tl.dot(queries, keys, input_precision="ieee") * (scale * LOG2E)
            if TOKEN_SCALES:
                slot = position % BLOCK_SIZE
                k_scales = tl.load(
                    k_scale + block.to(tl.int64) * k_scale_block + slot * k_scale_slot,
                    mask=in_context,
                    other=0.0,
                )
                scores = scores * k_scales[None, :]
            if SOFTCAP:
                scores = soft_cap(scores, softcap)
            if AHEAD:
                visible = in_context[None, :] & (position[None, :] <= query_position[:, None] + ahead)
            else:
                visible = in_context[None, :] & (position[None, :] <= query_position[:, None])
            if WINDOW:
                visible = visible & (position[None, :] > query_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - m_base)
            p = tl.exp2(scores - m_base[:, None])
            l_i = l_i * alpha + tl.sum(p, 1)
            values = tl.load(
                v + v_row[:, None] + dv[None, :], mask=in_context[:, None] & (dv < DV)[None, :], other=0.0
            )
            if FP8:
                values = e4m3_decode(values, queries.dtype, NATIVE)
            if TOKEN_SCALES:
                v_scales = tl.load(
                    v_scale + block.to(tl.int64) * v_scale_block + slot * v_scale_slot,
                    mask=in_context,
                    other=0.0,
                )
                # Relative to the largest scale that a row sees in the tile, so that weights keep their precision in float16.
                v_top = tl.max(tl.where(visible, v_scales[None, :], 0.0), 1)
                v_top = tl.where(v_top > 0, v_top, 1.0)
                p = p * (v_scales[None, :] / v_top[:, None])
                product = tl.dot(p.to(values.dtype), values, input_precision="ieee")
                acc = acc * alpha[:, None] + product * v_top[:, None]
            else:
                acc = acc * alpha[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
            m_i = m_new
        if FP8 and not TOKEN_SCALES:
            acc = acc * tl.load(v_scale)

        if SPLIT:
            partial = (part.to(tl.int64) * tokens + token) * heads + head
            l_safe = tl.where(l_i != 0, l_i, 1.0)
            tl.store(
                parts + partial[:, None] * DV + dv[None, :],
                acc / l_safe[:, None],
                mask=live[:, None] & (dv < DV)[None, :],
            )
            tl.store(parts_lse + partial, tl.where(l_i != 0, m_i + tl.log2(l_safe), float("-inf")), mask=live)
        else:
            if SINKS:
                sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2E
                m_new = tl.maximum(m_i, sink)
                m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
                alpha = tl.exp2(m_i - m_base)
                l_i = l_i * alpha + tl.exp2(sink - m_base)
                acc = acc * alpha[:, None]
                m_i = m_new
            l_safe = tl.where(l_i != 0, l_i, 1.0)
            out_at = out + token[:, None] * out_token + head[:, None] * out_head + dv[None, :]
            tl.store(
                out_at,
                (acc / l_safe[:, None]).to(out.dtype.element_ty),
                mask=live[:, None] & (dv < DV)[None, :],
            )
            if LSE:
                lse_i = tl.where(l_i != 0, (m_i + tl.log2(l_safe)) * LN2, float("-inf"))
                tl.store(lse + token * heads + head, lse_i, mask=live)


@jit(do_not_specialize=["tokens", "count"])  # type: ignore[call-arg, untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    lse,
    sinks,
    parts,
    parts_lse,
    tokens,
    heads,
    count,
    out_token,
    out_head,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """out[token, head] = results of the parts weighted by their log-sum-exps; the sink adds to the denominator."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for part in range(count):
        partial = (part * tokens + token) * heads + head
        lse_i = tl.load(parts_lse + partial)
        values = tl.load(parts + partial * DV + dv, mask=dv < DV, other=0.0)
        m_new = tl.maximum(m_i, lse_i)
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_base)
        weight = tl.exp2(lse_i - m_base)
        acc = acc * alpha + values * weight
        l_i = l_i * alpha + weight
        m_i = m_new
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        m_new = tl.maximum(m_i, sink)
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_base)
        l_i = l_i * alpha + tl.exp2(sink - m_base)
        acc = acc * alpha
        m_i = m_new
    l_safe = tl.where(l_i != 0, l_i, 1.0)
    tl.store(
        out + token * out_token + head * out_head + dv, (acc / l_safe).to(out.dtype.element_ty), mask=dv < DV
    )
    if LSE:
        tl.store(lse + token * heads + head, tl.where(l_i != 0, (m_i + tl.log2(l_safe)) * LN2, float("-inf")))


def partial_results(
    workspace: Tensor | None, rows: int, dim: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(results [rows, dim], log-sum-exps [rows]) in float32, in the caller's workspace or in fresh memory without one.

    ValueError if the workspace is too small.
    """
    import torch

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
    **dict.fromkeys(("parts", "parts_lse", "k_scale", "v_scale"), "*fp32"),
    **dict.fromkeys(("seqs", "tokens", "heads"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(
        ("window", "ahead", "part_length", "table_stride", "q_token", "q_head", "out_token", "out_head"),
        "i32",
    ),
    **dict.fromkeys(("k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head"), "i32"),
    **dict.fromkeys(("k_scale_block", "k_scale_slot", "k_scale_head"), "i32"),
    **dict.fromkeys(("v_scale_block", "v_scale_slot", "v_scale_head"), "i32"),
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
    kv_scale: str = "none",
    softcap: bool = False,
    ahead: bool = False,
) -> AotCase:
    """One compilation of `flash_kernel`, tiled as the launchers tile it for `target`, with a `kv_scale` for caches in e4m3."""
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
        "AHEAD": ahead,
        "SINKS": sinks,
        "LSE": lse,
        "SPLIT": split,
        "FP8": kv_scale != "none",
        "TOKEN_SCALES": kv_scale == "token",
        "NATIVE": kv_scale != "none" and has_e4m3(target),
        "SOFTCAP": softcap,
    }
    signature = SIGNATURE | dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}")
    if kv_scale != "none":
        signature |= dict.fromkeys(("k", "v"), "*u8")
    options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
    promises = () if dtype == "fp32" else matrix_product(target, rows)
    return AotCase(name, flash_kernel, signature, constants, options, ALIGNED, promises)
