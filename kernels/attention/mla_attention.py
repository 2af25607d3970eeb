"""Multi-head latent attention over a paged latent cache, absorbed (DeepSeek-V2, 2024).

The cache holds one row a token: the normalised latent and the rotated key that all heads share. With the key projection absorbed
into q and the value projection left to the caller, attention is multi-query: keys are whole rows, values their first
`latent_dim` elements. Correct for any number of new tokens, so that prefill may run absorbed too; un-absorbed prefill is
`varlen_attention`.
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
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    latent_dim: int = 512,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [tokens, heads, latent_dim + rope], cache [blocks, block_size, latent_dim + rope], block_table int32 [seqs, max_blocks],
    query_start int32 [seqs + 1], seq_lens int32 [seqs] -> out [tokens, heads, latent_dim] in q's dtype, float32 inside.

    Sequence i has new tokens query_start[i] .. query_start[i+1], the last of its seq_lens[i] context tokens; causal.
    scale multiplies the scores. lse float32 [tokens, heads]: written in place, natural logarithm. max_q, max_ctx: host-known
    bounds. Rows of q past query_start[-1] belong to no sequence: what out and lse hold there is unspecified.
    """
    import torch

    out = torch.zeros(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    if lse is not None:
        lse.fill_(float("-inf"))
    begin, block_size = query_start.tolist(), cache.shape[1]
    for index, context in enumerate(seq_lens.tolist()):
        rows = slice(begin[index], begin[index + 1])
        if rows.stop == rows.start:
            continue
        position = torch.arange(context, device=q.device)
        keys = cache[block_table[index, position // block_size].long(), position % block_size][:, None]
        found, total = causal_attention(q[rows], keys, keys[..., :latent_dim], scale)
        out[rows] = found.to(q.dtype)
        if lse is not None:
            lse[rows] = total
    return out


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments within the bounds: shuffled blocks, unowned slots NaN, unused table entries out of range."""
    import torch

    queries, contexts = ragged.lengths(problem, seed)
    tokens, heads, latent = problem.integers("q_tokens", "heads", "latent_dim")
    dim, block_size = latent + problem.integer("rope_dim"), problem.integer("block_size")
    dtype, max_ctx = torch_dtype(problem.text("x")), problem.integer("max_ctx")
    generator = torch.Generator(device).manual_seed(seed)
    tables, blocks = ragged.block_tables(contexts, block_size, seed)
    q = torch.randn(tokens, heads, dim, generator=generator, device=device, dtype=torch.float32) * 2
    cache = torch.full((blocks * block_size, dim), float("nan"), dtype=dtype, device=device)
    slots = ragged.owned_slots(tables, contexts, block_size).to(device)
    cache[slots] = torch.randn(len(slots), dim, generator=generator, device=device, dtype=torch.float32).to(
        dtype
    )
    lse = (
        torch.full((tokens, heads), float("nan"), device=device, dtype=torch.float32)
        if problem["lse"]
        else None
    )
    return [
        q.to(dtype),
        cache.view(blocks, block_size, dim),
        ragged.table_tensor(tables, -(-max_ctx // block_size)).to(device),
        torch.tensor(ragged.starts(queries), dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        problem.integer("max_q"),
        max_ctx,
        dim**-0.5,
        latent,
        lse,
        None,
    ]


def cost(problem: Problem) -> Cost:
    """q and out once, every cache row once for all heads; two products for each visible pair."""
    heads, latent, item = (
        problem.integer("heads"),
        problem.integer("latent_dim"),
        ITEM_BYTES[problem.text("x")],
    )
    dim = latent + problem.integer("rope_dim")
    read, pairs = ragged.visible_keys(problem)
    rows = problem.integer("q_tokens") * heads
    return Cost(
        bytes=(rows * (dim + latent) + read * dim) * item + (4 * rows if problem["lse"] else 0),
        flops=2 * pairs * heads * (dim + latent),
        unit=problem.text("x"),
    )


OP = Op(
    name="mla_attention",
    family="attention",
    summary="multi-head latent attention over a paged latent cache, absorbed; prefill and decode mixed",
    axes=(
        *ragged.RAGGED_AXES,
        Axis("heads", "int", "query heads", minimum=1),
        Axis(
            "latent_dim",
            "int",
            "elements of the latent: the values, and the first part of the keys",
            default=512,
            minimum=1,
        ),
        Axis("rope_dim", "int", "rotated elements of the keys", default=64),
        Axis("block_size", "int", "tokens of a cache block", default=64, minimum=1),
        Axis("x", "dtype", "dtype of q, the cache and the output", default="bf16", choices=FLOATS),
        Axis("lse", "bool", "the log-sum-exp is asked for", default=False),
    ),
    arguments=(
        Tensor("q", "q_tokens heads latent_dim+rope_dim", strides=VECTORS),
        Tensor("cache", "blocks block_size latent_dim+rope_dim", strides=VECTORS),
        Tensor("block_table", "seqs max_blocks", dtype="int32", strides=VECTORS),
        Tensor("query_start", "seqs+1", dtype="int32"),
        Tensor("seq_lens", "seqs", dtype="int32"),
        Scalar("max_q", "int", minimum=1),
        Scalar("max_ctx", "int", minimum=1),
        Scalar("scale", "float"),
        Scalar("latent_dim", "int", 512),
        Tensor("lse", "q_tokens heads", dtype="fp32", optional=True, mutable=True),
        Scratch(),
    ),
    returns=(Tensor("out", "q_tokens heads latent_dim", strides=VECTORS),),
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
        "q_tokens=0,seqs=1,max_q=1,max_ctx=1,total_ctx=0,heads=1,latent_dim=64,rope_dim=16,x=fp32",
        "q_tokens=3,seqs=3,max_q=1,max_ctx=70,total_ctx=150,heads=16",
        "q_tokens=11,seqs=3,max_q=9,max_ctx=40,total_ctx=77,heads=5,latent_dim=96,rope_dim=32,block_size=7,x=fp32,lse=true",
        "q_tokens=2,seqs=2,max_q=1,max_ctx=600,total_ctx=700,heads=20,latent_dim=128,rope_dim=64,x=fp16,lse=true",
    ),
    bench=(
        "q_tokens=1,seqs=1,max_q=1,max_ctx=4096,total_ctx=4096,heads=128",
        "q_tokens=64,seqs=64,max_q=1,max_ctx=4096,total_ctx=262144,heads=16",
        "q_tokens=64,seqs=64,max_q=1,max_ctx=4096,total_ctx=262144,heads=128",
    ),
)
