"""FlashInfer's paged attention wrappers, planned once per step.

`plan` reads lengths on the host, which waits for the device, so all layers of a step reuse one plan. A plan is reused only
for the same index tensors (a reference is kept, so that their memory is not reused for others), and only if they have not been
written since: torch counts writes to a tensor. Tensors of inference mode have no such count and are planned at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flashinfer
import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config

WORKSPACE_BYTES = 128 << 20


class Planned:
    """A wrapper on one device for one static problem, and the step for which it is planned."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.versions: tuple[int, ...] = ()
        self.bounds: tuple[int, ...] = ()

    def stale(self, tensors: tuple[torch.Tensor, ...], bounds: tuple[int, ...]) -> bool:
        """Whether the index tensors differ from those of the last call or were written since. Remembers them."""
        if any(tensor.is_inference() for tensor in tensors):
            self.tensors = ()
            return True
        versions = tuple(tensor._version for tensor in tensors)
        same = len(tensors) == len(self.tensors) and all(
            a is b for a, b in zip(tensors, self.tensors, strict=True)
        )
        if same and versions == self.versions and bounds == self.bounds:
            return False
        self.tensors, self.versions, self.bounds = tensors, versions, bounds
        return True


_PLANNED: dict[tuple[object, ...], Planned] = {}


def _planned(
    kind: str, device: torch.device, static: tuple[object, ...], make: Callable[[Tensor], Any]
) -> Planned:
    key = (kind, device, torch.cuda.current_stream(device).cuda_stream, static)
    if key not in _PLANNED:
        _PLANNED[key] = Planned(make(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)))
    return _PLANNED[key]


def _pages(block_table: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(page indptr, page indices on the device, length of each last page, lengths); all but the indices on the host."""
    contexts = seq_lens.cpu()
    counts = (contexts + block_size - 1) // block_size
    indptr = torch.zeros(len(contexts) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    inside = torch.arange(block_table.shape[1])[None] < counts[:, None]
    indices = block_table[inside.to(block_table.device)]
    return (
        indptr,
        indices,
        torch.where(contexts > 0, (contexts - 1) % block_size + 1, 0).to(torch.int32),
        contexts,
    )


def launch_paged(
    config: Config,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softcap: float,
    out: Tensor,
) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]. If every sequence has one new token, the decode
    wrapper runs, else the prefill wrapper."""
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    _, block_size, kv_heads, _ = k_cache.shape
    decode = max_q == 1 and tokens == seq_lens.shape[0]
    static = (heads, kv_heads, dim, block_size, q.dtype, window, scale)
    if decode:
        planned = _planned(
            "decode",
            q.device,
            static,
            lambda space: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                space, "NHD", use_tensor_cores=heads // kv_heads >= 4
            ),
        )
    else:
        planned = _planned(
            "prefill",
            q.device,
            static,
            lambda space: flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD"),
        )
    if planned.stale((block_table, query_start, seq_lens), (tokens,)):
        indptr, indices, last, _ = _pages(block_table, seq_lens, block_size)
        shared = {
            "sm_scale": scale,
            "window_left": window - 1 if window > 0 else -1,
            "q_data_type": q.dtype,
            "kv_data_type": k_cache.dtype,
        }
        if decode:
            planned.wrapper.plan(indptr, indices, last, heads, kv_heads, dim, block_size, **shared)
        else:
            starts = query_start.cpu()
            planned.wrapper.plan(
                starts, indptr, indices, last, heads, kv_heads, dim, block_size, causal=True, **shared
            )
    _run(planned.wrapper, (q, (k_cache, v_cache)), out, lse)


def launch_mla(
    config: Config,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    latent_dim: int,
    lse: Tensor | None,
    workspace: Tensor | None,
    out: Tensor,
) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim]."""
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    block_size = cache.shape[1]
    static = (heads, dim, latent_dim, block_size, q.dtype, scale)
    planned = _planned("mla", q.device, static, flashinfer.mla.BatchMLAPagedAttentionWrapper)
    if planned.stale((block_table, query_start, seq_lens), (tokens,)):
        indptr, indices, _, contexts = _pages(block_table, seq_lens, block_size)
        planned.wrapper.plan(
            query_start.cpu(),
            indptr,
            indices,
            contexts,
            heads,
            latent_dim,
            dim - latent_dim,
            block_size,
            True,
            scale,
            q.dtype,
            cache.dtype,
        )
    parts = (q[..., :latent_dim], q[..., latent_dim:], cache[..., :latent_dim], cache[..., latent_dim:])
    _run(planned.wrapper, parts, out, lse)


def _run(wrapper: Any, arguments: tuple[object, ...], out: Tensor, lse: Tensor | None) -> None:
    if lse is None:
        wrapper.run(*arguments, out=out)
    else:
        wrapper.run(*arguments, out=out, lse=lse, return_lse=True)
        lse.mul_(math.log(2))  # FlashInfer returns base 2
