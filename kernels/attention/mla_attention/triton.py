"""Absorbed latent attention in Triton: one row of the cache is the key of every head, and its first part the value.

A tile of the cache is read once for the latent part and once for the rotated part; the latent tile is key and value.
Tiles, bisection, split contexts and their merge are those of `_flash_triton.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.attention._flash_triton import (
    LN2,
    LOG2E,
    MERGE_SIGNATURE,
    find_sequence,
    merge_kernel,
    partial_results,
)
from gristmill.kernels.attention.tiles import (
    DEFAULT_MULTIPROCESSORS,
    mla_config,
    packing,
    part_length,
    power_of_two,
    split_count,
    tile_bound,
)
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall

LARGEST_LATENT = 512


def accepts(problem: Problem) -> str | None:
    """Latents of up to 512 elements: wider ones do not fit in registers."""
    latent = problem.integer("latent_dim")
    return f"latent_dim {latent} is over {LARGEST_LATENT}" if latent > LARGEST_LATENT else None


def config(problem: Problem, target: Target) -> Config:
    """One tile size for every batch and undivided contexts, so that a row is always computed in the same steps."""
    tile = mla_config(
        problem.integer("latent_dim"), problem.integer("rope_dim"), problem.text("x"), 16, target
    )
    return {**tile, "programs": 0}


def split_config(problem: Problem, target: Target) -> Config:
    """As `config`, with enough parts to fill the device."""
    return {**config(problem, target), "programs": 2 * (target.multiprocessors or DEFAULT_MULTIPROCESSORS)}


def split_space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles, warps and numbers of parts around the default."""
    base = split_config(problem, target)
    count = target.multiprocessors or DEFAULT_MULTIPROCESSORS
    return [
        {**base, "m": rows, "n": keys, "warps": warps, "stages": stages, "programs": programs * count}
        for rows, keys, warps in ((16, 16, 4), (16, 32, 4), (16, 32, 8), (32, 32, 8), (64, 32, 8))
        for stages in (1, 2)
        for programs in (1, 2, 4)
    ]


def split_workspace(problem: Problem, config: Config) -> Workspace:
    """Partial results of the parts, for the worst-case sequences and lengths of the problem's tokens."""
    heads = problem.integer("heads")
    head_tiles, tile_q = packing(heads, int(config["m"]))
    rows = problem.integer("q_tokens") + int(config["programs"]) * 2 * tile_q // head_tiles
    return Workspace(rows * heads * (problem.integer("latent_dim") + 1) * 4)


@jit
def mla_kernel(
    q,
    cache,
    out,
    lse,
    table,
    query_start,
    seq_lens,
    parts,
    parts_lse,
    seqs,
    tokens,
    heads,
    scale,
    part_length,
    table_stride,
    q_token,
    q_head,
    out_token,
    out_head,
    c_block,
    c_slot,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TILE_Q: tl.constexpr = BLOCK_M // HEADS
    tile = tl.program_id(0)
    sequence = find_sequence(query_start, seqs, tile, TILE_Q)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    offset = (tile - (begin // TILE_Q + sequence)) * TILE_Q
    if offset < count:
        context = tl.load(seq_lens + sequence)
        first = context - count + offset
        rows = tl.arange(0, BLOCK_M)
        query = rows // HEADS
        head = tl.program_id(1) * HEADS + rows % HEADS
        live = (query < TILE_Q) & (offset + query < count) & (head < heads)
        token = (begin + offset + query).to(tl.int64)
        query_position = first + query
        latent = tl.arange(0, BLOCK_LATENT)
        rope = tl.arange(0, BLOCK_ROPE)
        q_row = q + token[:, None] * q_token + head[:, None] * q_head
        q_latent = tl.load(
            q_row + latent[None, :], mask=live[:, None] & (latent < LATENT)[None, :], other=0.0
        )
        q_rope = tl.load(
            q_row + LATENT + rope[None, :], mask=live[:, None] & (rope < ROPE)[None, :], other=0.0
        )

        low = 0
        end = tl.minimum(context, first + TILE_Q)
        if SPLIT:
            part = tl.program_id(2)
            low = part * part_length
            end = tl.minimum(end, low + part_length)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_LATENT], tl.float32)
        for start in range(low, end, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            in_context = position < end
            block = tl.load(
                table + sequence.to(tl.int64) * table_stride + position // BLOCK_SIZE,
                mask=in_context,
                other=0,
            )
            row = cache + block.to(tl.int64) * c_block + (position % BLOCK_SIZE) * c_slot
            values = tl.load(
                row[:, None] + latent[None, :],
                mask=in_context[:, None] & (latent < LATENT)[None, :],
                other=0.0,
            )
            rotated = tl.load(
                row[:, None] + LATENT + rope[None, :],
                mask=in_context[:, None] & (rope < ROPE)[None, :],
                other=0.0,
            )
            scores = tl.dot(q_latent, tl.trans(values), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision="ieee") * (scale * LOG2E)
            visible = in_context[None, :] & (position[None, :] <= query_position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - m_base)
            p = tl.exp2(scores - m_base[:, None])
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
            m_i = m_new

        l_safe = tl.where(l_i != 0, l_i, 1.0)
        valid_out = live[:, None] & (latent < LATENT)[None, :]
        if SPLIT:
            partial = (part.to(tl.int64) * tokens + token) * heads + head
            tl.store(
                parts + partial[:, None] * LATENT + latent[None, :], acc / l_safe[:, None], mask=valid_out
            )
            tl.store(parts_lse + partial, tl.where(l_i != 0, m_i + tl.log2(l_safe), float("-inf")), mask=live)
        else:
            out_at = out + token[:, None] * out_token + head[:, None] * out_head + latent[None, :]
            tl.store(out_at, (acc / l_safe[:, None]).to(out.dtype.element_ty), mask=valid_out)
            if LSE:
                lse_i = tl.where(l_i != 0, (m_i + tl.log2(l_safe)) * LN2, float("-inf"))
                tl.store(lse + token * heads + head, lse_i, mask=live)


def launch(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim]; programs > 0 in the config splits contexts.

    The number of parts follows from host-known bounds, so that a captured graph replays the same launch.
    """
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    rows, rope = int(config["m"]), dim - call.latent_dim
    head_tiles, tile_q = packing(heads, rows)
    seqs = call.seq_lens.shape[0]
    tiles = tile_bound(tokens, seqs, tile_q)
    busy = max(seqs, tokens // tile_q) * head_tiles
    programs = int(config["programs"])
    splits = split_count(busy, programs, call.max_ctx) if programs else 1
    parts = parts_lse = call.out
    if splits > 1:
        parts, parts_lse = partial_results(
            call.workspace, splits * tokens * heads, call.latent_dim, call.q.device
        )
    lse_out = call.out if call.lse is None else call.lse
    mla_kernel[(tiles, head_tiles, splits)](
        call.q,
        call.cache,
        call.out,
        lse_out,
        call.block_table,
        call.query_start,
        call.seq_lens,
        parts,
        parts_lse,
        seqs,
        tokens,
        heads,
        call.scale,
        part_length(call.max_ctx, splits, int(config["n"])),
        call.block_table.stride(0),
        call.q.stride(0),
        call.q.stride(1),
        call.out.stride(0),
        call.out.stride(1),
        call.cache.stride(0),
        call.cache.stride(1),
        HEADS=cdiv(heads, head_tiles),
        BLOCK_SIZE=call.cache.shape[1],
        LATENT=call.latent_dim,
        ROPE=rope,
        BLOCK_LATENT=power_of_two(call.latent_dim),
        BLOCK_ROPE=power_of_two(max(rope, 1)),
        BLOCK_M=rows,
        BLOCK_N=config["n"],
        LSE=call.lse is not None,
        SPLIT=splits > 1,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )
    if splits > 1:
        merge_kernel[(tokens, heads)](
            call.out,
            lse_out,
            call.out,
            parts,
            parts_lse,
            tokens,
            heads,
            splits,
            call.out.stride(0),
            call.out.stride(1),
            DV=call.latent_dim,
            BLOCK_DV=power_of_two(call.latent_dim),
            SINKS=False,
            LSE=call.lse is not None,
            num_warps=4,
        )


SIGNATURE = {
    **dict.fromkeys(("q", "cache", "out"), "*bf16"),
    "lse": "*fp32",
    **dict.fromkeys(("table", "query_start", "seq_lens"), "*i32"),
    **dict.fromkeys(("parts", "parts_lse"), "*fp32"),
    **dict.fromkeys(("seqs", "tokens", "heads"), "i32"),
    "scale": "fp32",
    **dict.fromkeys(
        ("part_length", "table_stride", "q_token", "q_head", "out_token", "out_head", "c_block", "c_slot"),
        "i32",
    ),
}
ALIGNED = ("q", "cache", "out", "parts", "q_token", "q_head", "out_token", "out_head", "c_block", "c_slot")


def _case(name: str, target: Target, rows: int, split: bool) -> AotCase:
    config = mla_config(512, 64, "bf16", rows, target)
    constants = {
        "HEADS": rows,
        "BLOCK_SIZE": 64,
        "LATENT": 512,
        "ROPE": 64,
        "BLOCK_LATENT": 512,
        "BLOCK_ROPE": 64,
        "BLOCK_M": rows,
        "BLOCK_N": config["n"],
        "LSE": True,
        "SPLIT": split,
    }
    options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
    return AotCase(name, mla_kernel, SIGNATURE, constants, options, ALIGNED, matrix_product(target, rows))


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: DeepSeek's widths."""
    return [_case("whole", target, 16, False)]


def aot_split(target: Target) -> list[AotCase]:
    """The same with a split context, and the merge."""
    merge = {"DV": 512, "BLOCK_DV": 512, "SINKS": False, "LSE": True}
    return [
        _case("split", target, 16, True),
        AotCase("merge", merge_kernel, MERGE_SIGNATURE, merge, {"num_warps": 4}, ("out", "lse", "parts")),
    ]


KERNELS = (
    Kernel(
        op="mla_attention",
        name="mla_attention_triton",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot",
        requires=Requirement(code="triton"),
        summary="16 heads or queries at a time, a cache tile being key and value, one pass over the context",
        accepts=accepts,
        config=config,
        batch_invariant=True,
        priority=50,
    ),
    Kernel(
        op="mla_attention",
        name="mla_attention_triton_split",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot_split",
        requires=Requirement(code="triton"),
        summary="as mla_attention_triton, contexts split over programs and merged",
        accepts=accepts,
        config=split_config,
        space=split_space,
        workspace=split_workspace,
        priority=55,
    ),
)
