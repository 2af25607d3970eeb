"""Paged attention by torch: gathers each sequence's blocks and multiplies, query heads regrouped by KV head.

torch's own grouped attention reads a bf16 cache at a hundredth of memory speed on CPUs; the regrouped products do not.
On a GPU nothing is read back: the host-known bounds stand for the lengths, masked, so the kernel can be captured.
"""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

QUERY_TILE = 256


def launch(
    config: Config, q: Any, k_cache: Any, v_cache: Any, block_table: Any, query_start: Any, seq_lens: Any, max_q: int,
    max_ctx: int, scale: float, window: int, sinks: Any, lse: Any, workspace: Any, out: Any,
) -> None:  # fmt: skip
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    import torch

    block_size = k_cache.shape[1]
    if q.device.type == "cpu":
        begin = query_start.tolist()
        for index, context in enumerate(seq_lens.tolist()):
            rows = slice(begin[index], begin[index + 1])
            count = rows.stop - rows.start
            if count == 0:
                continue
            first = max(0, context - count - window + 1) // block_size * block_size if window > 0 else 0
            blocks = block_table[index, first // block_size : -(-context // block_size)].long()
            keys = k_cache[blocks].flatten(0, 1)[: context - first]
            values = v_cache[blocks].flatten(0, 1)[: context - first]
            kept = torch.arange(first, context)
            _attend(q[rows], keys, values, kept, torch.arange(context - count, context), context, scale, window, sinks,
                    out[rows], None if lse is None else lse[rows])  # fmt: skip
        return
    kept = torch.arange(max_ctx, device=q.device)
    step = torch.arange(max_q, device=q.device)
    limit = k_cache.shape[0] - 1
    for index in range(seq_lens.shape[0]):
        context, begin, end = seq_lens[index], query_start[index], query_start[index + 1]
        blocks = block_table[index, : -(-max_ctx // block_size)].long().clamp(0, limit)
        keys, values = (cache[blocks].flatten(0, 1)[:max_ctx] for cache in (k_cache, v_cache))
        values = values.masked_fill((kept >= context)[:, None, None], 0)
        rows = begin + step
        inside = rows < end
        take = rows.clamp(max=q.shape[0] - 1)
        own = context - (end - begin) + step
        made = torch.empty((max_q, *q.shape[1:]), dtype=q.dtype, device=q.device)
        stated = None if lse is None else torch.empty((max_q, q.shape[1]), device=q.device)
        _attend(q[take], keys, values, kept, own, context, scale, window, sinks, made, stated)
        # Rows of other sequences are added nothing: a row is written once, all others of the padded tile go nowhere.
        spare = torch.where(inside, rows, q.shape[0])
        _scatter(out, spare, made)
        if lse is not None:
            _scatter(lse, spare, stated)


def _scatter(target: Any, rows: Any, values: Any) -> None:
    """target[rows] = values where rows < len(target); the rest is dropped."""
    import torch

    padded = torch.empty((target.shape[0] + 1, *target.shape[1:]), dtype=target.dtype, device=target.device)
    padded[:-1] = target
    padded[rows] = values
    target.copy_(padded[:-1])


def _attend(
    q: Any, keys: Any, values: Any, kept: Any, own: Any, context: Any, scale: float, window: int, sinks: Any, out: Any, lse: Any
) -> None:
    """One sequence: q [n, heads, D] at positions own [n], keys and values [c, kv_heads, D] at positions kept [c]."""
    import torch

    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = q.view(count, kv_heads, group, dim) if q.is_contiguous() else q.reshape(count, kv_heads, group, dim)
    keys, values = keys.permute(1, 2, 0), values.permute(1, 0, 2)
    if q.device.type == "cpu":
        keys, values = keys.float(), values.float()
    for begin in range(0, count, QUERY_TILE):
        part = grouped[begin : begin + QUERY_TILE].permute(1, 2, 0, 3).flatten(1, 2)
        positions = own[begin : begin + QUERY_TILE]
        scores = (torch.matmul(part.to(keys.dtype), keys).float() * scale).view(kv_heads, group, len(positions), -1)
        seen = (kept <= positions[:, None]) & (kept < context)
        if window > 0:
            seen &= kept > positions[:, None] - window
        scores = scores.masked_fill(~seen, float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp_min(-1e30)
        if sinks is not None:
            sink = sinks.view(kv_heads, group, 1, 1)
            top = torch.maximum(top, sink)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sink - top).exp()
        product = torch.matmul(weights.flatten(1, 2).to(values.dtype), values).float()
        product = product.view(kv_heads, group, len(positions), dim) / torch.where(total > 0, total, 1.0)
        out[begin : begin + QUERY_TILE] = product.permute(2, 0, 1, 3).reshape(-1, heads, dim).to(out.dtype)
        if lse is not None:
            stated = torch.where(total > 0, top + total.log(), float("-inf"))
            lse[begin : begin + QUERY_TILE] = stated[..., 0].permute(2, 0, 1).reshape(-1, heads)


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="gathers blocks, regrouped matrix products, a sequence at a time",
)
