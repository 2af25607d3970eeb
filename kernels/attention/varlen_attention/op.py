"""Attention over dense sequences of different lengths, keys and values of different widths: causal, bidirectional, or in a window.

The un-absorbed prefill of multi-head latent attention (192 elements of query and key, 128 of value, a key for every head), encoders, and any
prefill without a cache. Sequence i has new tokens query_start[i] .. query_start[i+1] of q; they are the last of its context,
rows context_start[i] .. context_start[i+1] of k and v. Query head h reads KV head h // (heads / kv_heads). The query at position p of a
context of c keys sees keys max(0, p - window_left) .. min(c - 1, p + window_right), a window of -1 being unlimited (as in FlashAttention):
(-1, 0) is causal, (w - 1, 0) causal over the last w keys, (-1, -1) bidirectional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.attention import lengths as ragged
from gristmill.kernels.attention.causal import attend
from gristmill.kernels.attention.ragged_inputs import RaggedDraw, starts
from gristmill.kernels.common import FLOATS

if TYPE_CHECKING:
    import torch

LONGEST = 2**31 - 1
"""The widest window: positions are int32 as `context_start` is, and no sum of a window and a position overflows int64."""


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    context_start: torch.Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    lse: torch.Tensor | None = None,
    window_left: int = -1,
    window_right: int = 0,
) -> torch.Tensor:
    """q [tokens, heads, Dk], k [ctx, kv_heads, Dk], v [ctx, kv_heads, Dv], query_start and context_start int32 [seqs + 1]
    -> out [tokens, heads, Dv] in q's dtype, float32 inside.

    scale multiplies the scores. lse float32 [tokens, heads]: written in place, natural logarithm. max_q, max_ctx: host-known bounds.
    window_left, window_right: keys before and after its own that a query sees, -1 = all. Rows of q past query_start[-1] belong to no sequence:
    what out and lse hold there is unspecified.
    """
    import torch

    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    begin = context_start.tolist()

    def context(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(begin[index], begin[index + 1])
        return k[rows], v[rows]

    return attend(q, query_start, context, scale, lse, out, window=window_left + 1, ahead=window_right)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments within the bounds; k and v are parts of one wider projection, as MLA has them."""
    draw, (tokens, heads, kv_heads, dk, dv) = RaggedDraw(problem, seed, device), _sizes(problem)
    q, kv = draw.normal(tokens, heads, dk) * 2, draw.normal(sum(draw.contexts), kv_heads, dk + dv)
    q, kv = draw.stored(q, kv)
    starting = (draw.query_start, draw.indices(starts(draw.contexts)))
    windows = problem.integers("window_left", "window_right")
    return [q, kv[..., :dk], kv[..., dk:], *starting, *draw.bounds, dk**-0.5, draw.lse(), *windows]


def _sizes(problem: Problem) -> tuple[int, ...]:
    return problem.integers("q_tokens", "heads", "kv_heads", "qk_dim", "v_dim")


def cost(problem: Problem) -> Cost:
    """q and out once, every key and value once; two products for each visible pair."""
    tokens, heads, kv_heads, dk, dv = _sizes(problem)
    left, right = problem.integers("window_left", "window_right")
    read, pairs = ragged.visible_keys(problem, left + 1, ahead=right)
    elements = (tokens * heads + read * kv_heads) * (dk + dv)
    return ragged.attention_cost(problem, elements, 2 * pairs * heads * (dk + dv))


OP = Op(
    name="varlen_attention",
    family="attention",
    summary="attention over dense sequences of different lengths: causal (un-absorbed MLA prefill), bidirectional (encoders), windowed",
    axes=(
        *ragged.RAGGED_AXES,
        Axis("heads", "int", "query heads", minimum=1),
        Axis("kv_heads", "int", "KV heads; divides heads", minimum=1),
        Axis("qk_dim", "int", "elements of a query or key head", default=192, minimum=1),
        Axis("v_dim", "int", "elements of a value head", default=128, minimum=1),
        Axis("x", "dtype", "dtype of q, k, v and the output", default="bf16", choices=FLOATS),
        Axis("lse", "bool", "the log-sum-exp is written too", default=False),
        Axis(
            "window_left",
            "int",
            "keys before its own that a query sees; -1 = all",
            default=-1,
            minimum=-1,
            opt_in=True,
        ),
        Axis(
            "window_right",
            "int",
            "keys after its own that a query sees; -1 = all",
            default=0,
            minimum=-1,
            opt_in=True,
        ),
    ),
    arguments=(
        Tensor("q", "q_tokens heads qk_dim", strides=VECTORS),
        Tensor("k", "total_ctx kv_heads qk_dim", strides=VECTORS),
        Tensor("v", "total_ctx kv_heads v_dim", strides=VECTORS),
        Tensor("query_start", "seqs+1", dtype="int32"),
        Tensor("context_start", "seqs+1", dtype="int32"),
        *ragged.BOUNDS,
        Tensor("lse", "q_tokens heads", dtype="fp32", optional=True, mutable=True),
        Scalar("window_left", "int", -1, minimum=-1, maximum=LONGEST),
        Scalar("window_right", "int", 0, minimum=-1, maximum=LONGEST),
    ),
    returns=(Tensor("out", "q_tokens heads v_dim", strides=VECTORS),),
    rules=(ragged.queries_fit, ragged.contexts_fit),
    reference=reference,
    inputs=inputs,
    check=ragged.misfit,
    cost=cost,
    tolerance=ragged.tolerance,
    error=ragged.error,
    shrink=ragged.shrunk,
    bucket="q_tokens",
    examples=(
        "q_tokens=0,seqs=1,max_q=1,max_ctx=1,total_ctx=0,heads=2,kv_heads=2,qk_dim=24,v_dim=16,x=fp32",
        "q_tokens=40,seqs=3,max_q=33,max_ctx=50,total_ctx=90,heads=2,kv_heads=2",
        "q_tokens=17,seqs=4,max_q=9,max_ctx=37,total_ctx=77,heads=6,kv_heads=2,qk_dim=48,v_dim=80,x=fp32,lse=true",
        "q_tokens=7,seqs=1,max_q=7,max_ctx=7,total_ctx=7,heads=3,kv_heads=1,qk_dim=64,v_dim=64,x=fp16,lse=true",
        "q_tokens=290,seqs=5,max_q=257,max_ctx=257,total_ctx=290,heads=2,kv_heads=2,qk_dim=64,v_dim=64,x=fp32,lse=true,window_left=-1,window_right=-1",
        "q_tokens=40,seqs=3,max_q=33,max_ctx=50,total_ctx=90,heads=2,kv_heads=1,qk_dim=64,v_dim=64,window_left=5,window_right=3",
        "q_tokens=300,seqs=3,max_q=211,max_ctx=300,total_ctx=500,heads=2,kv_heads=2,qk_dim=48,v_dim=32,x=fp16,lse=true,window_left=64,window_right=64",
        "q_tokens=131,seqs=2,max_q=130,max_ctx=270,total_ctx=400,heads=3,kv_heads=1,qk_dim=64,v_dim=64,x=fp32,window_left=0,window_right=-1",
        "q_tokens=17,seqs=4,max_q=9,max_ctx=37,total_ctx=77,heads=6,kv_heads=2,qk_dim=40,v_dim=40,lse=true,window_left=3",
    ),
    bench=(
        "q_tokens=2048,seqs=1,max_q=2048,max_ctx=2048,total_ctx=2048,heads=128,kv_heads=128",
        "q_tokens=8192,seqs=8,max_q=1024,max_ctx=1024,total_ctx=8192,heads=16,kv_heads=16",
        "q_tokens=1024,seqs=32,max_q=32,max_ctx=32,total_ctx=1024,heads=12,kv_heads=12,qk_dim=64,v_dim=64,window_right=-1",
        "q_tokens=4096,seqs=8,max_q=512,max_ctx=512,total_ctx=4096,heads=12,kv_heads=12,qk_dim=64,v_dim=64,window_right=-1",
        "q_tokens=4096,seqs=8,max_q=512,max_ctx=512,total_ctx=4096,heads=12,kv_heads=12,qk_dim=64,v_dim=64,window_left=64,window_right=64",
    ),
)
