"""Attention over a paged KV cache: causal, any mix of prefill and decode in one call (Kwon et al., PagedAttention, 2023).

Sequence i has new tokens query_start[i] .. query_start[i+1] of q, the last ones of its seq_lens[i] context tokens, all of
which are already in the cache. The query at position p sees keys 0..p, or with a window the last `window` of them. Query
head h reads KV head h // (heads / kv_heads). The caches may hold e4m3 codes with scales per tensor, per head, or per token
and head (`kv_cache.quantized`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Tensor, WorkspaceArgument
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.attention import lengths as ragged
from gristmill.kernels.attention.causal import attend, slots_of
from gristmill.kernels.attention.ragged_inputs import RaggedDraw
from gristmill.kernels.common import FLOATS
from gristmill.kernels.kv_cache import quantized
from gristmill.kernels.kv_cache.quantized import scales_fit

if TYPE_CHECKING:
    import torch

SOFTCAP = 2.5
"""The soft cap of random problems: scores with a spread of about 2 are partly far under it and partly over it."""


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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [tokens, heads, D], k_cache and v_cache [blocks, block_size, kv_heads, D], block_table int32 [seqs, max_blocks],
    query_start int32 [seqs + 1], seq_lens int32 [seqs] -> out [tokens, heads, D] in q's dtype, float32 inside.

    scale multiplies the scores. window: keys a query sees, itself included; 0 or less = all. sinks float32 [heads]: one more
    logit per head in the softmax, with no value (gpt-oss). lse float32 [tokens, heads]: written in place, the natural
    logarithm of the softmax's denominator, sink included. max_q, max_ctx: host-known bounds. A query that sees no key gives 0.
    Rows of q past query_start[-1] belong to no sequence: what out and lse hold there is unspecified.

    k_scale, v_scale: the scales of caches of e4m3 codes, float32 [1, 1, 1] (per tensor), [1, 1, kv_heads] (per head) or
    [blocks, block_size, kv_heads] (per token and head); None for caches of q's dtype. Keys are code · scale in float32.

    softcap: a score s becomes softcap · tanh(s / softcap), before the mask and without the sink's logit (Gemma 2); 0 = scores as they are.
    """
    import torch

    def context(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots_of(block_table, seq_lens, k_cache.shape[1], index)
        if k_scale is None or v_scale is None:
            return k_cache[slots], v_cache[slots]
        at = slots if quantized.by_token(k_scale) else (0, 0)
        keys = quantized.dequantize(k_cache[slots], k_scale[at])
        return keys, quantized.dequantize(v_cache[slots], v_scale[at])

    return attend(q, query_start, context, scale, lse, torch.zeros_like(q), window, sinks, softcap)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments within the bounds: shuffled blocks, unowned slots and their scales NaN, unused table entries out of range,
    q as rows of a wider buffer (as after a fused QKV projection), scores with a spread of about 2 so that single keys matter."""
    draw, (heads, kv_heads, dim) = (
        RaggedDraw(problem, seed, device),
        problem.integers("heads", "kv_heads", "head_dim"),
    )
    qkv = draw.normal(problem.integer("q_tokens"), heads + 2 * kv_heads, dim) * 2
    pages, table = draw.pages(2, kv_heads, dim)
    *caches, k_scale, v_scale = quantized.stored(draw, *pages)
    sequences = (table, draw.query_start, draw.indices(draw.contexts))
    sinks = draw.normal(heads) + 1 if problem["sinks"] else None
    options = (
        dim**-0.5,
        problem.integer("window"),
        sinks,
        draw.lse(),
        None,
        k_scale,
        v_scale,
        SOFTCAP if problem["softcap"] else 0.0,
    )
    return [qkv.to(draw.dtype)[:, :heads], *caches, *sequences, *draw.bounds, *options]


def misfit(problem: Problem) -> str | None:
    """What keeps the axes of `problem` from going together; None if nothing does."""
    return ragged.misfit(problem) or quantized.misfit(problem)


def cost(problem: Problem) -> Cost:
    """q and out once, every visible key and value once; two multiply-adds for each visible pair and head element."""
    tokens, heads, kv_heads, dim = problem.integers("q_tokens", "heads", "kv_heads", "head_dim")
    read, pairs = ragged.visible_keys(problem, problem.integer("window"))
    cost = ragged.attention_cost(problem, 2 * tokens * heads * dim, 4 * pairs * heads * dim)
    return replace(cost, bytes=cost.bytes + 2 * read * kv_heads * quantized.row_bytes(problem, dim))


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
        Axis("x", "dtype", "dtype of q and the output", default="bf16", choices=FLOATS),
        Axis("window", "int", "keys a query sees, itself included; 0 = all", default=0),
        Axis("sinks", "bool", "one more softmax logit per head", default=False),
        Axis("lse", "bool", "the log-sum-exp is written too", default=False),
        *quantized.AXES,
        Axis("softcap", "bool", "scores are limited by softcap · tanh(score / softcap)", default=False),
    ),
    arguments=(
        Tensor("q", "q_tokens heads head_dim", strides=VECTORS),
        Tensor("k_cache", "blocks block_size kv_heads head_dim", dtype="kv", strides=VECTORS),
        Tensor("v_cache", "blocks block_size kv_heads head_dim", dtype="kv", strides=VECTORS),
        *ragged.PAGES,
        *ragged.BOUNDS,
        Scalar("window", "int", 0),
        Tensor("sinks", "heads", dtype="fp32", optional=True),
        Tensor("lse", "q_tokens heads", dtype="fp32", optional=True, mutable=True),
        WorkspaceArgument(),
        *quantized.scale_arguments(mutable=False),
        Scalar("softcap", "float", 0.0, minimum=0.0, finite=True),
    ),
    returns=(Tensor("out", "q_tokens heads head_dim", strides=VECTORS),),
    values={"window": "max(0, window)", "softcap": "softcap > 0", **quantized.VALUES},
    rules=(ragged.queries_fit, ragged.table_fits, scales_fit),
    reference=reference,
    inputs=inputs,
    check=misfit,
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
        "q_tokens=5,seqs=5,max_q=1,max_ctx=70,total_ctx=200,heads=8,kv_heads=2,kv=fp8,kv_scale=head",
        "q_tokens=29,seqs=4,max_q=17,max_ctx=53,total_ctx=120,heads=6,kv_heads=3,head_dim=80,x=fp32,window=9,lse=true,kv=fp8,kv_scale=token",
        "q_tokens=21,seqs=3,max_q=16,max_ctx=40,total_ctx=77,heads=4,kv_heads=2,head_dim=96,block_size=7,x=fp16,sinks=true,lse=true,kv=fp8,kv_scale=token",
        "q_tokens=2,seqs=2,max_q=1,max_ctx=620,total_ctx=700,heads=4,kv_heads=2,head_dim=64,sinks=true,lse=true,kv=fp8,kv_scale=token",
        "q_tokens=29,seqs=4,max_q=17,max_ctx=53,total_ctx=120,heads=6,kv_heads=2,head_dim=80,x=fp32,window=9,lse=true,softcap=true",
        "q_tokens=5,seqs=5,max_q=1,max_ctx=620,total_ctx=1200,heads=8,kv_heads=2,head_dim=256,softcap=true",
        "q_tokens=21,seqs=3,max_q=16,max_ctx=40,total_ctx=77,heads=4,kv_heads=2,head_dim=96,block_size=7,x=fp16,sinks=true,lse=true,kv=fp8,kv_scale=token,softcap=true",
    ),
    bench=(
        "q_tokens=1,seqs=1,max_q=1,max_ctx=1024,total_ctx=1024,heads=32,kv_heads=8",
        "q_tokens=1,seqs=1,max_q=1,max_ctx=32768,total_ctx=32768,heads=32,kv_heads=8",
        "q_tokens=64,seqs=64,max_q=1,max_ctx=4096,total_ctx=262144,heads=32,kv_heads=8",
        "q_tokens=1,seqs=1,max_q=1,max_ctx=32768,total_ctx=32768,heads=32,kv_heads=8,kv=fp8,kv_scale=head",
        "q_tokens=64,seqs=64,max_q=1,max_ctx=4096,total_ctx=262144,heads=32,kv_heads=8,kv=fp8,kv_scale=head",
        "q_tokens=2048,seqs=1,max_q=2048,max_ctx=2048,total_ctx=2048,heads=32,kv_heads=8",
        "q_tokens=2079,seqs=32,max_q=2048,max_ctx=4096,total_ctx=100000,heads=32,kv_heads=8",
    ),
)
