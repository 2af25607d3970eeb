"""Attention over a paged KV cache: causal, any mix of prefill and decode in one call (Kwon et al., PagedAttention, 2023).

Sequence i has new tokens query_start[i] .. query_start[i+1] of q, the last ones of its seq_lens[i] context tokens, all of
which are already in the cache. The query at position p sees keys 0..p, or with a window the last `window` of them. Query
head h reads KV head h // (heads / kv_heads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Scratch, Tensor
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.attention import lengths as ragged
from gristmill.kernels.attention.causal import causal_attention
from gristmill.kernels.common import (
    FLOATS,
    ITEM_BYTES,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [tokens, heads, D], k_cache and v_cache [blocks, block_size, kv_heads, D], block_table int32 [seqs, max_blocks],
    query_start int32 [seqs + 1], seq_lens int32 [seqs] -> out [tokens, heads, D] in q's dtype, float32 inside.

    scale multiplies the scores. window: keys a query sees, itself included; 0 or less = all. sinks float32 [heads]: one more
    logit a head in the softmax, with no value (gpt-oss). lse float32 [tokens, heads]: written in place, the natural
    logarithm of the softmax's denominator, sink included. max_q, max_ctx: host-known bounds. A query that sees no key gives 0.
    Rows of q past query_start[-1] belong to no sequence: what out and lse hold there is unspecified.
    """
    import torch

    out = torch.zeros_like(q)
    if lse is not None:
        lse.fill_(float("-inf"))
    begin, block_size = query_start.tolist(), k_cache.shape[1]
    for index, context in enumerate(seq_lens.tolist()):
        rows = slice(begin[index], begin[index + 1])
        if rows.stop == rows.start:
            continue
        position = torch.arange(context, device=q.device)
        slots = block_table[index, position // block_size].long(), position % block_size
        found, total = causal_attention(q[rows], k_cache[slots], v_cache[slots], scale, window, sinks)
        out[rows] = found.to(q.dtype)
        if lse is not None:
            lse[rows] = total
    return out


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments within the bounds: shuffled blocks, unowned slots NaN, unused table entries out of range, q as rows
    of a wider buffer (as after a fused QKV projection), scores with a spread of about 2 so that single keys matter."""
    import torch

    queries, contexts = ragged.lengths(problem, seed)
    heads, kv_heads, dim = problem.integers("heads", "kv_heads", "head_dim")
    block_size, dtype = problem.integer("block_size"), torch_dtype(problem.text("x"))
    generator = torch.Generator(device).manual_seed(seed)
    tables, blocks = ragged.block_tables(contexts, block_size, seed)
    tokens = problem.integer("q_tokens")
    wide = (
        torch.randn(
            tokens, heads + 2 * kv_heads, dim, generator=generator, device=device, dtype=torch.float32
        )
        * 2
    )
    cache = torch.full((2, blocks * block_size, kv_heads, dim), float("nan"), dtype=dtype, device=device)
    slots = ragged.owned_slots(tables, contexts, block_size).to(device)
    for part in cache:
        part[slots] = torch.randn(
            len(slots), kv_heads, dim, generator=generator, device=device, dtype=torch.float32
        ).to(dtype)
    caches = cache.view(2, blocks, block_size, kv_heads, dim)
    max_ctx = max(problem.integer("max_ctx"), 1)
    table = ragged.table_tensor(tables, -(-max_ctx // block_size))
    sinks = (
        torch.randn(heads, generator=generator, device=device, dtype=torch.float32) + 1
        if problem["sinks"]
        else None
    )
    lse = (
        torch.full((tokens, heads), float("nan"), device=device, dtype=torch.float32)
        if problem["lse"]
        else None
    )
    return [
        wide.to(dtype)[:, :heads],
        caches[0],
        caches[1],
        table.to(device),
        torch.tensor(ragged.starts(queries), dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        problem.integer("max_q"),
        max_ctx,
        dim**-0.5,
        problem.integer("window"),
        sinks,
        lse,
        None,
    ]


def cost(problem: Problem) -> Cost:
    """q and out once, every visible key and value once; two multiply-adds for each visible pair and head element."""
    heads, dim, item = problem.integer("heads"), problem.integer("head_dim"), ITEM_BYTES[problem.text("x")]
    read, pairs = ragged.visible_keys(problem, problem.integer("window"))
    rows = problem.integer("q_tokens") * heads
    return Cost(
        bytes=(2 * rows + 2 * read * problem.integer("kv_heads")) * dim * item
        + (4 * rows if problem["lse"] else 0),
        flops=4 * pairs * heads * dim,
        unit=problem.text("x"),
    )


OP = Op(
    name="paged_attention",
    family="attention",
    summary="causal attention over a paged KV cache, prefill and decode mixed",
    axes=(
        *ragged.RAGGED_AXES,
        Axis("heads", "int", "query heads", minimum=1),
        Axis("kv_heads", "int", "KV heads; divides heads", minimum=1),
        Axis("head_dim", "int", "elements of a head", default=128, minimum=1),
        Axis("block_size", "int", "tokens of a cache block", default=16, minimum=1),
        Axis("x", "dtype", "dtype of q, the caches and the output", default="bf16", choices=FLOATS),
        Axis("window", "int", "keys a query sees, itself included; 0 = all", default=0),
        Axis("sinks", "bool", "one more softmax logit a head", default=False),
        Axis("lse", "bool", "the log-sum-exp is asked for", default=False),
    ),
    arguments=(
        Tensor("q", "q_tokens heads head_dim", strides=VECTORS),
        Tensor("k_cache", "blocks block_size kv_heads head_dim", strides=VECTORS),
        Tensor("v_cache", "blocks block_size kv_heads head_dim", strides=VECTORS),
        Tensor("block_table", "seqs max_blocks", dtype="int32", strides=VECTORS),
        Tensor("query_start", "seqs+1", dtype="int32"),
        Tensor("seq_lens", "seqs", dtype="int32"),
        Scalar("max_q", "int", minimum=1),
        Scalar("max_ctx", "int", minimum=1),
        Scalar("scale", "float"),
        Scalar("window", "int", 0),
        Tensor("sinks", "heads", dtype="fp32", optional=True),
        Tensor("lse", "q_tokens heads", dtype="fp32", optional=True, mutable=True),
        Scratch(),
    ),
    returns=(Tensor("out", "q_tokens heads head_dim", strides=VECTORS),),
    values={"window": "max(0, window)"},
    rules=(ragged.queries_fit, ragged.table_fits),
    reference=reference,
    inputs=inputs,
    check=ragged.misfit,
    cost=cost,
    tolerance=ragged.tolerance,
    error=ragged.error,
    shrink=ragged.shrunk,
    bucket="q_tokens",
    examples=(
        "q_tokens=0,seqs=1,max_q=1,max_ctx=1,total_ctx=0,heads=2,kv_heads=2,head_dim=64,x=fp32",
        "q_tokens=1,seqs=1,max_q=1,max_ctx=1,total_ctx=1,heads=1,kv_heads=1,head_dim=64,x=fp32,lse=true",
        "q_tokens=5,seqs=5,max_q=1,max_ctx=70,total_ctx=200,heads=8,kv_heads=2,head_dim=128",
        "q_tokens=29,seqs=4,max_q=17,max_ctx=53,total_ctx=120,heads=6,kv_heads=2,head_dim=80,x=fp32,window=9,lse=true",
        "q_tokens=21,seqs=3,max_q=16,max_ctx=40,total_ctx=77,heads=4,kv_heads=1,head_dim=96,block_size=7,x=fp16,sinks=true,lse=true",
        "q_tokens=3,seqs=6,max_q=2,max_ctx=37,total_ctx=150,heads=4,kv_heads=4,head_dim=256,block_size=32,x=fp32,sinks=true,window=20",
        "q_tokens=2,seqs=2,max_q=1,max_ctx=620,total_ctx=700,heads=4,kv_heads=2,head_dim=64,x=fp32,sinks=true,lse=true",
    ),
    bench=(
        "q_tokens=1,seqs=1,max_q=1,max_ctx=1024,total_ctx=1024,heads=32,kv_heads=8",
        "q_tokens=1,seqs=1,max_q=1,max_ctx=32768,total_ctx=32768,heads=32,kv_heads=8",
        "q_tokens=64,seqs=64,max_q=1,max_ctx=4096,total_ctx=262144,heads=32,kv_heads=8",
        "q_tokens=2048,seqs=1,max_q=2048,max_ctx=2048,total_ctx=2048,heads=32,kv_heads=8",
        "q_tokens=2079,seqs=32,max_q=2048,max_ctx=4096,total_ctx=100000,heads=32,kv_heads=8",
    ),
)
