"""Multi-head latent attention over a paged latent cache, absorbed (DeepSeek-V2, 2024).

The cache holds one row per token: the normalised latent and the rotated key that all heads share. With the key projection absorbed
into q and the value projection left to the caller, attention is multi-query: keys are whole rows, values their first
`latent_dim` elements. Correct for any number of new tokens, so that prefill may run absorbed too; un-absorbed prefill is
`varlen_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Tensor, WorkspaceArgument
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.attention import lengths as ragged
from gristmill.kernels.attention.causal import attend, slots_of
from gristmill.kernels.attention.ragged_inputs import RaggedDraw
from gristmill.kernels.common import FLOATS

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

    def context(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = cache[slots_of(block_table, seq_lens, cache.shape[1], index)][:, None]
        return keys, keys[..., :latent_dim]

    return attend(q, query_start, context, scale, lse, out)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments within the bounds: shuffled blocks, unowned slots NaN, unused table entries out of range."""
    draw, (tokens, heads, latent, rope) = RaggedDraw(problem, seed, device), _sizes(problem)
    (q,) = draw.stored(draw.normal(tokens, heads, latent + rope) * 2)
    (cache,), table = draw.pages(1, latent + rope)
    sequences = (table, draw.query_start, draw.indices(draw.contexts))
    return [q, cache, *sequences, *draw.bounds, (latent + rope) ** -0.5, latent, draw.lse(), None]


def _sizes(problem: Problem) -> tuple[int, ...]:
    return problem.integers("q_tokens", "heads", "latent_dim", "rope_dim")


def cost(problem: Problem) -> Cost:
    """q and out once, every cache row once for all heads; two products for each visible pair."""
    tokens, heads, latent, rope = _sizes(problem)
    read, pairs = ragged.visible_keys(problem)
    elements = tokens * heads * (2 * latent + rope) + read * (latent + rope)
    return ragged.attention_cost(problem, elements, 2 * pairs * heads * (2 * latent + rope))


OP = Op(
    name="mla_attention",
    family="attention",
    summary="multi-head latent attention over a paged latent cache, absorbed; prefill and decode mixed",
    axes=(
        *ragged.RAGGED_AXES,
        Axis("heads", "int", "query heads", minimum=1),
        Axis(
            "latent_dim", "int", "elements of the values, the first ones of the keys", default=512, minimum=1
        ),
        Axis("rope_dim", "int", "rotated elements of the keys", default=64),
        Axis("block_size", "int", "tokens of a cache block", default=64, minimum=1),
        Axis("x", "dtype", "dtype of q, the cache and the output", default="bf16", choices=FLOATS),
        Axis("lse", "bool", "the log-sum-exp is written too", default=False),
    ),
    arguments=(
        Tensor("q", "q_tokens heads latent_dim+rope_dim", strides=VECTORS),
        Tensor("cache", "blocks block_size latent_dim+rope_dim", strides=VECTORS),
        *ragged.PAGES,
        *ragged.BOUNDS,
        Scalar("latent_dim", "int", 512),
        Tensor("lse", "q_tokens heads", dtype="fp32", optional=True, mutable=True),
        WorkspaceArgument(),
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
