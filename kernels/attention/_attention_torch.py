"""Attention in torch, shared by the torch kernels: one sequence at a time, query heads regrouped by KV head.

On CPUs torch's own grouped attention reads a bf16 cache at a hundredth of the memory bandwidth; the regrouped products do not.
On a GPU nothing is read back: host-known bounds replace the lengths, with masks, so that the kernels can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.kv_cache.quantized import by_token, dequantize

if TYPE_CHECKING:
    from gristmill.kernels.calls import MlaAttentionCall, PagedAttentionCall, VarlenAttentionCall

QUERY_TILE = 256

Gather = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""gather(sequence, first, end) -> keys [end - first, kv_heads, Dk] and values [.., Dv] of these positions; past a
sequence's context (only on GPUs) any existing rows."""


def attend_sequences(
    q: Tensor,
    gather: Gather,
    query_start: Tensor,
    contexts: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    lse: Tensor | None,
    out: Tensor,
    softcap: float = 0.0,
    ahead: int = 0,
) -> None:
    """q [tokens, heads, Dk] -> out [tokens, heads, Dv], lse [tokens, heads] or None; contexts int32 [seqs].

    A query at p sees `window` keys up to its own, 0 = all, and `ahead` after it, -1 = all."""
    if q.device.type == "cpu":
        starts = query_start.tolist()
        for index, context in enumerate(contexts.tolist()):
            new_tokens = slice(starts[index], starts[index + 1])
            count = new_tokens.stop - new_tokens.start
            if count == 0:
                continue
            first = max(0, context - count - window + 1) if window > 0 else 0
            keys, values = gather(index, first, context)
            key_positions, query_positions = (
                torch.arange(first, context),
                torch.arange(context - count, context),
            )
            _attend(
                q[new_tokens],
                keys,
                values,
                key_positions,
                query_positions,
                context,
                scale,
                window,
                sinks,
                out[new_tokens],
                None if lse is None else lse[new_tokens],
                softcap,
                ahead,
            )
        return
    if q.shape[0] == 0:
        return
    key_positions = torch.arange(max_ctx, device=q.device)
    step = torch.arange(max_q, device=q.device)
    for index in range(contexts.shape[0]):
        context, begin, end = contexts[index], query_start[index], query_start[index + 1]
        keys, values = gather(index, 0, max_ctx)
        values = values.masked_fill((key_positions >= context)[:, None, None], 0)
        rows = begin + step
        inside = rows < end
        query_positions = context - (end - begin) + step
        padded_out = torch.empty((max_q, *out.shape[1:]), dtype=q.dtype, device=q.device)
        padded_lse = (
            None if lse is None else torch.empty((max_q, q.shape[1]), device=q.device, dtype=torch.float32)
        )
        _attend(
            q[rows.clamp(max=q.shape[0] - 1)],
            keys,
            values,
            key_positions,
            query_positions,
            context,
            scale,
            window,
            sinks,
            padded_out,
            padded_lse,
            softcap,
            ahead,
        )
        # Rows past the end of the sequence are computed and discarded.
        rows = torch.where(inside, rows, q.shape[0])
        _scatter(out, rows, padded_out)
        if lse is not None and padded_lse is not None:
            _scatter(lse, rows, padded_lse)


def _scatter(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[rows] = values where rows < len(target); other rows are discarded."""
    padded = torch.empty((target.shape[0] + 1, *target.shape[1:]), dtype=target.dtype, device=target.device)
    padded[:-1] = target
    padded[rows] = values
    target.copy_(padded[:-1])


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    context: int | Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    softcap: float,
    ahead: int,
) -> None:
    """One sequence: q [n, heads, Dk] at query_positions [n], keys [c, kv_heads, Dk] and values [c, kv_heads, Dv] at key_positions [c]."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(count, kv_heads, group, dim)
    keys, values = keys.permute(1, 2, 0), values.permute(1, 0, 2)
    # In half precision torch rounds the scores, and the weights before the second product; the reference does not.
    keys, values = keys.float(), values.float()
    for begin in range(0, count, QUERY_TILE):
        tile = grouped[begin : begin + QUERY_TILE].permute(1, 2, 0, 3).flatten(1, 2)
        positions = query_positions[begin : begin + QUERY_TILE]
        scores = (torch.matmul(tile.to(keys.dtype), keys).float() * scale).view(
            kv_heads, group, len(positions), -1
        )
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        visible = (key_positions < context).expand(len(positions), -1)
        if ahead >= 0:
            visible = visible & (key_positions <= positions[:, None] + ahead)
        if window > 0:
            visible = visible & (key_positions > positions[:, None] - window)
        scores = scores.masked_fill(~visible, float("-inf"))
        m_i = scores.amax(-1, keepdim=True).clamp_min(-1e30)
        if sinks is not None:
            sink = sinks.view(kv_heads, group, 1, 1)
            m_i = torch.maximum(m_i, sink)
        weights = (scores - m_i).exp()
        l_i = weights.sum(-1, keepdim=True)
        if sinks is not None:
            l_i = l_i + (sink - m_i).exp()
        product = torch.matmul(weights.flatten(1, 2).to(values.dtype), values).float()
        product = product.view(kv_heads, group, len(positions), -1) / torch.where(l_i != 0, l_i, 1.0)
        out[begin : begin + QUERY_TILE] = (
            product.permute(2, 0, 1, 3).reshape(len(positions), heads, -1).to(out.dtype)
        )
        if lse is not None:
            lse_i = torch.where(l_i != 0, m_i + l_i.log(), float("-inf"))
            lse[begin : begin + QUERY_TILE] = lse_i[..., 0].permute(2, 0, 1).reshape(len(positions), heads)


def paged_gather(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Gather:
    """Keys and values [.., kv_heads, D] out of caches [blocks, block_size, kv_heads, D]; in float32 if these hold codes."""
    block_size, blocks = k_cache.shape[1], k_cache.shape[0]

    def gather(index: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        start = first // block_size
        blocks_read = block_table[index, start : cdiv(end, block_size)].long()
        if blocks_read.is_cuda:
            blocks_read = blocks_read.clamp(0, blocks - 1)
        in_context = slice(first - start * block_size, end - start * block_size)

        def rows(cache: Tensor, scale: Tensor | None) -> Tensor:
            if scale is None:
                return cache[blocks_read].flatten(0, 1)[in_context]
            codes = cache.view(torch.uint8)[blocks_read].view(cache.dtype).flatten(0, 1)[in_context]
            row_scale = scale[blocks_read].flatten(0, 1)[in_context] if by_token(scale) else scale[0, 0]
            return dequantize(codes, row_scale)

        return rows(k_cache, k_scale), rows(v_cache, v_scale)

    return gather


def launch_paged(config: Config, call: PagedAttentionCall) -> None:
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    gather = paged_gather(call.k_cache, call.v_cache, call.block_table, call.k_scale, call.v_scale)
    attend_sequences(
        call.q,
        gather,
        call.query_start,
        call.seq_lens,
        call.max_q,
        call.max_ctx,
        call.scale,
        call.window,
        call.sinks,
        call.lse,
        call.out,
        call.softcap,
    )


def launch_mla(config: Config, call: MlaAttentionCall) -> None:
    """The arguments of `mla_attention.reference`, then out [tokens, heads, latent_dim]."""
    rows = call.cache[:, :, None]
    gather = paged_gather(rows, rows[..., : call.latent_dim], call.block_table)
    attend_sequences(
        call.q,
        gather,
        call.query_start,
        call.seq_lens,
        call.max_q,
        call.max_ctx,
        call.scale,
        0,
        None,
        call.lse,
        call.out,
    )


def launch_varlen(config: Config, call: VarlenAttentionCall) -> None:
    """The arguments of `varlen_attention.reference`, then out [tokens, heads, Dv]."""
    begin = call.context_start.tolist() if call.q.device.type == "cpu" else call.context_start

    def gather(index: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(first, end, device=call.q.device) + begin[index]
        if rows.is_cuda:
            rows = rows.clamp(max=call.k.shape[0] - 1)
        return call.k[rows], call.v[rows]

    contexts = call.context_start[1:] - call.context_start[:-1]
    attend_sequences(
        call.q,
        gather,
        call.query_start,
        contexts,
        call.max_q,
        call.max_ctx,
        call.scale,
        call.window_left + 1,
        None,
        call.lse,
        call.out,
        ahead=call.window_right,
    )
