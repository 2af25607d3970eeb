"""FlashInfer's paged attention wrappers, planned once per step.

`plan` reads lengths on the host, which waits for the device, so all layers of a step reuse one plan. A plan is reused only
for the same index tensors (a reference is kept, so that their memory is not reused for others), and only if they have not been
written since: torch counts writes to a tensor. Tensors of inference mode have no such count and are planned at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flashinfer
import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall, PagedAttentionCall

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


def launch_paged(config: Config, call: PagedAttentionCall) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]. If every sequence has one new token, the decode
    wrapper runs, else the prefill wrapper."""
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    _, block_size, kv_heads, _ = call.k_cache.shape
    decode = call.max_q == 1 and tokens == call.seq_lens.shape[0]
    static = (heads, kv_heads, dim, block_size, call.q.dtype, call.window, call.scale)
    if decode:
        planned = _planned(
            "decode",
            call.q.device,
            static,
            lambda space: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                space, "NHD", use_tensor_cores=heads // kv_heads >= 4
            ),
        )
    else:
        planned = _planned(
            "prefill",
            call.q.device,
            static,
            lambda space: flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD"),
        )
    if planned.stale((call.block_table, call.query_start, call.seq_lens), (tokens,)):
        indptr, indices, last, _ = _pages(call.block_table, call.seq_lens, block_size)
        shared = {
            "sm_scale": call.scale,
            "window_left": call.window - 1 if call.window > 0 else -1,
            "q_data_type": call.q.dtype,
            "kv_data_type": call.k_cache.dtype,
        }
        if decode:
            planned.wrapper.plan(indptr, indices, last, heads, kv_heads, dim, block_size, **shared)
        else:
            starts = call.query_start.cpu()
            planned.wrapper.plan(
                starts, indptr, indices, last, heads, kv_heads, dim, block_size, causal=True, **shared
            )
    _run(planned.wrapper, (call.q, (call.k_cache, call.v_cache)), call.out, call.lse)


def launch_mla(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim]."""
    tokens, heads, dim = call.q.shape
    if tokens == 0:
        return
    block_size = call.cache.shape[1]
    static = (heads, dim, call.latent_dim, block_size, call.q.dtype, call.scale)
    planned = _planned("mla", call.q.device, static, flashinfer.mla.BatchMLAPagedAttentionWrapper)
    if planned.stale((call.block_table, call.query_start, call.seq_lens), (tokens,)):
        indptr, indices, _, contexts = _pages(call.block_table, call.seq_lens, block_size)
        planned.wrapper.plan(
            call.query_start.cpu(),
            indptr,
            indices,
            contexts,
            heads,
            call.latent_dim,
            dim - call.latent_dim,
            block_size,
            True,
            call.scale,
            call.q.dtype,
            call.cache.dtype,
        )
    parts = (
        call.q[..., : call.latent_dim],
        call.q[..., call.latent_dim :],
        call.cache[..., : call.latent_dim],
        call.cache[..., call.latent_dim :],
    )
    _run(planned.wrapper, parts, call.out, call.lse)


def _run(wrapper: Any, arguments: tuple[object, ...], out: Tensor, lse: Tensor | None) -> None:
    if lse is None:
        wrapper.run(*arguments, out=out)
    else:
        wrapper.run(*arguments, out=out, lse=lse, return_lse=True)
        lse.mul_(math.log(2))  # FlashInfer returns base 2
