"""FlashAttention-4 in CuTe DSL, its path for Hopper, over sequences of equal lengths. It gets dense keys and values, its best case."""

from __future__ import annotations

from functools import partial

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries.fa3 import accepts_dense, output


def equal_lengths(problem: Problem) -> bool:
    """Whether all sequences have as many new tokens and as long contexts as the bounds say."""
    tokens, seqs, max_q, max_ctx, total = problem.integers(
        "q_tokens", "seqs", "max_q", "max_ctx", "total_ctx"
    )
    return tokens == seqs * max_q and total == seqs * max_ctx


def accepts_pages(problem: Problem) -> str | None:
    if not equal_lengths(problem) or problem.integer("max_ctx") % problem.integer("block_size"):
        return "called for sequences of equal lengths, in whole pages"
    plain = problem["kv"] == "x" and not problem["window"] and not problem["sinks"]
    return None if plain else "called without a window, sinks and quantized caches"


def bind_pages(problem: Problem, arguments: Arguments, splits: int) -> Run:
    from flash_attn.cute import flash_attn_func

    q, k, v, table = arguments[:4]
    scale, softcap, seqs, max_ctx = arguments[8], arguments[15], len(table), arguments[7]
    pages = table[:, : max_ctx // k.shape[1]].long()
    dense = [cache[pages].reshape(seqs, max_ctx, *cache.shape[2:]) for cache in (k, v)]
    queries = q.reshape(seqs, -1, *q.shape[1:])
    options = {"softcap": softcap} if softcap else {}
    return partial(
        flash_attn_func, queries, *dense, softmax_scale=scale, causal=True, num_splits=splits, **options
    )


def accepts_one(problem: Problem) -> str | None:
    one = problem.integer("seqs") == 1 and equal_lengths(problem)
    whole = problem.integer("max_q") == problem.integer("max_ctx")
    return accepts_dense(problem) or (None if one and whole else "called for one sequence without a prefix")


def bind_dense(problem: Problem, arguments: Arguments) -> Run:
    from flash_attn.cute import flash_attn_func

    q, k, v = (argument[None] for argument in arguments[:3])
    return partial(flash_attn_func, q, k, v, softmax_scale=arguments[7], causal=True)


def flat_output(arguments: Arguments, result: object) -> list[torch.Tensor]:
    """[tokens, heads, D] of [sequences, tokens, heads, D]."""
    return [out.flatten(0, 1) for out in output(arguments, result)]


def accepts_decode(problem: Problem) -> str | None:
    return accepts_pages(problem) if problem.integer("max_q") == 1 else "split for decodes only"


PEER = Peer(
    name="fa4",
    package="flash-attn-4",
    modules=("cutlass", "flash_attn.cute"),
    adapters=(
        Adapter(
            op="paged_attention",
            accepts=accepts_pages,
            bind=partial(bind_pages, splits=1),
            outputs=flat_output,
        ),
        Adapter(
            op="paged_attention",
            variant="split",
            accepts=accepts_decode,
            bind=partial(bind_pages, splits=0),
            outputs=flat_output,
        ),
        Adapter(op="varlen_attention", accepts=accepts_one, bind=bind_dense, outputs=flat_output),
    ),
)
