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


def bind_pages(problem: Problem, arguments: Arguments) -> Run:
    import flashinfer

    q, k, v, table, begin, lengths, max_q, _, scale, window = arguments[:10]
    heads, kv_heads, dim, block = problem.integers("heads", "kv_heads", "head_dim", "block_size")
    shared = {
        "sm_scale": scale,
        "window_left": window - 1 if window > 0 else -1,
        "q_data_type": q.dtype,
        "kv_data_type": k.dtype,
    }
    if arguments[15]:
        shared["logits_soft_cap"] = arguments[15]
    pages = (*_pages(table, lengths, block), heads, kv_heads, dim, block)
    if max_q == 1 and len(q) == len(lengths):
        tensor_cores = heads // kv_heads >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(q.device), "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(*pages, **shared)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
        wrapper.plan(begin.cpu(), *pages, causal=True, **shared)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    return partial(wrapper.run, q.contiguous(), (k, v), out=out)


def accepts_latents(problem: Problem) -> str | None:
    return default_registry().kernel("mla_attention", "mla_attention_flashinfer").accepts(problem)


def bind_latents(problem: Problem, arguments: Arguments) -> Run:
    import flashinfer

    q, cache, table, begin, lengths, _, _, scale, latent = arguments[:9]
    heads, rope, block = problem.integers("heads", "rope_dim", "block_size")
    first, pages, _ = _pages(table, lengths, block)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(q.device))
    sizes = (heads, latent, rope, block, True, scale, q.dtype, cache.dtype)
    wrapper.plan(begin.cpu(), first, pages, lengths.cpu(), *sizes)
    parts = (q[..., :latent], q[..., latent:], cache[..., :latent], cache[..., latent:])
    out = torch.full((*q.shape[:2], latent), float("nan"), dtype=q.dtype, device=q.device)
    return partial(wrapper.run, *parts, out=out)


def accepts_dense(problem: Problem) -> str | None:
    causal = problem.integers("window_left", "window_right") == (-1, 0)
    widths = problem.integers("qk_dim", "v_dim")
    return None if causal and widths == (192, 128) else "called causally, for MLA's 192 and 128 elements"


def bind_dense(problem: Problem, arguments: Arguments) -> Run:
    import flashinfer

    q, k, v, begin, context_begin, _, _, scale = arguments[:8]
    heads, kv_heads, qk_dim, v_dim = problem.integers("heads", "kv_heads", "qk_dim", "v_dim")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD")
    wrapper.plan(
        begin.cpu(),
        context_begin.cpu(),
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        causal=True,
        sm_scale=scale,
        q_data_type=q.dtype,
    )
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

    return partial(flashinfer.rmsnorm, *arguments, out=torch.full_like(arguments[0], float("nan")))


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
