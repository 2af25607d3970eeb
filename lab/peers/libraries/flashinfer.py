"""FlashInfer: paged attention, latent attention and dense prefill, planned before they are timed; sampling and norms."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import cdiv
from lab.peers.adapter import Adapter, Arguments, Peer, Run, in_place

WORKSPACE_BYTES = 128 << 20


@lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    """One for all wrappers: their calls run one after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _pages(table: torch.Tensor, lengths: torch.Tensor, block: int) -> list[torch.Tensor]:
    """First page of each sequence in the list of pages, that list, and the tokens of each last page."""
    contexts = lengths.tolist()
    counts = torch.tensor([cdiv(context, block) for context in contexts], dtype=torch.int32)
    begin = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    return [begin, pages, torch.tensor([(context - 1) % block + 1 for context in contexts]).int()]


def accepts_pages(problem: Problem) -> str | None:
    """As the wrapped kernel, which has no soft cap."""
    kernel = default_registry().kernel("paged_attention", "paged_attention_flashinfer")
    return kernel.accepts(problem.with_values(softcap=False))


@lru_cache(maxsize=1)
def _planned_pages(
    problem: Problem,
    dtype: torch.dtype,
    table: torch.Tensor,
    begin: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float,
) -> Any:
    """A wrapper with its plan: one for all calls, as for all layers of a step."""
    import flashinfer

    heads, kv_heads, dim, block = problem.integers("heads", "kv_heads", "head_dim", "block_size")
    shared = {
        "sm_scale": scale,
        "window_left": problem.integer("window") - 1,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }
    if softcap:
        shared["logits_soft_cap"] = softcap
    pages = (*_pages(table, lengths, block), heads, kv_heads, dim, block)
    if problem.integer("max_q") == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(table.device), "NHD", use_tensor_cores=heads // kv_heads >= 4
        )
        wrapper.plan(*pages, **shared)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(table.device), "NHD")
        wrapper.plan(begin.cpu(), *pages, causal=True, **shared)
    return wrapper


def bind_pages(problem: Problem, arguments: Arguments) -> Run:
    q, k, v, table, begin, lengths = arguments[:6]
    wrapper = _planned_pages(problem, q.dtype, table, begin, lengths, arguments[8], arguments[15])
    return partial(wrapper.run, q.contiguous(), (k, v))


def accepts_latents(problem: Problem) -> str | None:
    return default_registry().kernel("mla_attention", "mla_attention_flashinfer").accepts(problem)


@lru_cache(maxsize=1)
def _planned_latents(
    problem: Problem,
    dtype: torch.dtype,
    table: torch.Tensor,
    begin: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> Any:
    """As `_planned_pages`."""
    import flashinfer

    block = problem.integer("block_size")
    first, pages, _ = _pages(table, lengths, block)
    sizes = problem.integers("heads", "latent_dim", "rope_dim", "block_size")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(table.device))
    wrapper.plan(begin.cpu(), first, pages, lengths.cpu(), *sizes, True, scale, dtype, dtype)
    return wrapper


def bind_latents(problem: Problem, arguments: Arguments) -> Run:
    q, cache, table, begin, lengths, _, _, scale, latent = arguments[:9]
    wrapper = _planned_latents(problem, q.dtype, table, begin, lengths, scale)
    parts = (q[..., :latent], q[..., latent:], cache[..., :latent], cache[..., latent:])
    return partial(wrapper.run, *parts)


def accepts_dense(problem: Problem) -> str | None:
    causal = problem.integers("window_left", "window_right") == (-1, 0)
    widths = problem.integers("qk_dim", "v_dim")
    return None if causal and widths == (192, 128) else "called causally, for MLA's 192 and 128 elements"


@lru_cache(maxsize=1)
def _planned_dense(
    problem: Problem, dtype: torch.dtype, begin: torch.Tensor, context_begin: torch.Tensor, scale: float
) -> Any:
    """As `_planned_pages`."""
    import flashinfer

    sizes = problem.integers("heads", "kv_heads", "qk_dim", "v_dim")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(begin.device), "NHD")
    bounds = begin.cpu(), context_begin.cpu()
    wrapper.plan(*bounds, *sizes, causal=True, sm_scale=scale, q_data_type=dtype)
    return wrapper


def bind_dense(problem: Problem, arguments: Arguments) -> Run:
    q, k, v, begin, context_begin, _, _, scale = arguments[:8]
    wrapper = _planned_dense(problem, q.dtype, begin, context_begin, scale)
    return partial(wrapper.run, q, k.contiguous(), v.contiguous())


def bind_sample(problem: Problem, arguments: Arguments) -> Run:
    """torch's softmax, then FlashInfer's sampling from probabilities."""
    import flashinfer

    logits, temperature, top_k, top_p = arguments[:4]

    def run() -> Any:
        probabilities = (logits / temperature[:, None]).softmax(-1)
        return flashinfer.sampling.top_k_top_p_sampling_from_probs(
            probabilities, top_k, top_p, filter_apply_order="top_k_first"
        )

    return run


def ids(arguments: Arguments, result: Any) -> list[torch.Tensor]:
    return [result.long()]


def bind_add_norm(problem: Problem, arguments: Arguments) -> Run:
    import flashinfer

    return partial(flashinfer.fused_add_rmsnorm, *arguments)


def bind_norm(problem: Problem, arguments: Arguments) -> Run:
    import flashinfer

    return partial(flashinfer.rmsnorm, *arguments)


PEER = Peer(
    name="flashinfer",
    package="flashinfer-python",
    modules=("flashinfer",),
    adapters=(
        Adapter(op="paged_attention", accepts=accepts_pages, bind=bind_pages),
        Adapter(op="mla_attention", accepts=accepts_latents, bind=bind_latents),
        Adapter(op="varlen_attention", accepts=accepts_dense, bind=bind_dense),
        Adapter(op="sample", bind=bind_sample, outputs=ids),
        Adapter(op="fused_add_rms_norm", bind=bind_add_norm, outputs=in_place),
        Adapter(op="rms_norm", bind=bind_norm),
    ),
)
