"""FlashAttention-3 as vLLM has it: over a paged cache, with its schedule computed in each call or before, and over dense sequences."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run


def accepts_pages(problem: Problem) -> str | None:
    return (
        None
        if problem["kv"] == "x"
        else "called with caches of q's dtype: it takes FP8 queries with FP8 caches"
    )


@lru_cache(maxsize=1)
def _schedule(
    problem: Problem,
    dtype: torch.dtype,
    begin: torch.Tensor,
    lengths: torch.Tensor,
    max_q: int,
    max_ctx: int,
    sides: tuple[int, int],
) -> Any:
    """One for all calls, as for all layers of a step."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    return get_scheduler_metadata(
        len(lengths),
        max_q,
        max_ctx,
        *problem.integers("heads", "kv_heads", "head_dim"),
        lengths,
        qkv_dtype=dtype,
        cu_seqlens_q=begin,
        page_size=problem.integer("block_size"),
        causal=True,
        window_size=sides,
        **({"has_softcap": True} if problem["softcap"] else {}),
    )


def bind_pages(problem: Problem, arguments: Arguments, planned: bool) -> Run:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    q, k, v, table, begin, lengths, max_q, max_ctx, scale, window, sinks = arguments[:11]
    softcap, sides = arguments[15], (window - 1, 0) if window else (-1, -1)
    options: dict[str, Any] = {"scheduler_metadata": None}
    if planned:
        schedule = _schedule(problem, q.dtype, begin, lengths, max_q, max_ctx, sides)
        options["scheduler_metadata"] = schedule
    if softcap:
        options["softcap"] = softcap
    if sinks is not None:
        options["s_aux"] = sinks.to(q.dtype)
    return partial(
        flash_attn_varlen_func,
        q,
        k,
        v,
        max_q,
        begin,
        max_ctx,
        seqused_k=lengths,
        softmax_scale=scale,
        causal=True,
        window_size=[*sides],
        block_table=table,
        fa_version=3,
        num_splits=0,
        **options,
    )


def accepts_dense(problem: Problem) -> str | None:
    causal = problem.integers("window_left", "window_right") == (-1, 0)
    return None if causal else "called causally, without a window"


def bind_dense(problem: Problem, arguments: Arguments) -> Run:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    q, k, v, begin, context_begin, max_q, max_ctx, scale = arguments[:8]
    return partial(
        flash_attn_varlen_func,
        q,
        k,
        v,
        max_q,
        begin,
        max_ctx,
        cu_seqlens_k=context_begin,
        softmax_scale=scale,
        causal=True,
        fa_version=3,
    )


def output(arguments: Arguments, result: Any) -> list[torch.Tensor]:
    """Without the log-sum-exp, where it is returned too."""
    return [result[0] if isinstance(result, tuple) else result]


PEER = Peer(
    name="fa3",
    package="vllm",
    modules=("vllm.vllm_flash_attn.flash_attn_interface",),
    adapters=(
        Adapter(
            op="paged_attention",
            accepts=accepts_pages,
            bind=partial(bind_pages, planned=False),
            outputs=output,
        ),
        Adapter(
            op="paged_attention",
            variant="planned",
            accepts=accepts_pages,
            bind=partial(bind_pages, planned=True),
            outputs=output,
        ),
        Adapter(op="varlen_attention", accepts=accepts_dense, bind=bind_dense, outputs=output),
    ),
)
