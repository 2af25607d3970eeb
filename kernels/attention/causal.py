"""Attention of one sequence in float32, the basis of every attention reference: causal, or over a window that is ahead of a query too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def causal_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """q [n, heads, Dk], keys [c, kv_heads, Dk], values [c, kv_heads, Dv] -> (out [n, heads, Dv], lse [n, heads]), float32.

    The n queries are the last of the c positions. softmax(scale · q·k + mask) · v, the query at position p seeing keys 0..p or,
    with window > 0, the last `window` of them, and `ahead` keys after p, -1 = all; query head h reads KV head h // (heads / kv_heads).
    softcap > 0: scores s become softcap · tanh(s / softcap) before the mask. sinks [heads]: one additional logit per head in the denominator,
    without a value.
    lse is the natural logarithm of the denominator; a query that sees nothing gives 0 and lse -inf.
    """
    import torch

    count, heads = q.shape[0], q.shape[1]
    context, kv_heads = keys.shape[0], keys.shape[1]
    keys = keys.float().repeat_interleave(heads // kv_heads, dim=1)
    values = values.float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    position = torch.arange(context, device=q.device)
    query_position = torch.arange(context - count, context, device=q.device)[:, None]
    visible = torch.ones(count, context, dtype=torch.bool, device=q.device)
    if ahead >= 0:
        visible &= position <= query_position + ahead
    if window > 0:
        visible &= position > query_position - window
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None, None].float())
    # Not by `nan_to_num`: a query that is not a number gives none.
    weights = (scores - lse).exp().masked_fill(lse == float("-inf"), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), lse[..., 0].T


def attend(
    q: Tensor,
    query_start: Tensor,
    context: Callable[[int], tuple[Tensor, Tensor]],
    scale: float,
    lse: Tensor | None,
    out: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    ahead: int = 0,
) -> Tensor:
    """`causal_attention` of every sequence with new tokens, with keys and values from ``context(index)``; returns `out`, zero for rows
    of no sequence. lse is written in place."""
    if lse is not None:
        lse.fill_(float("-inf"))
    begin = query_start.tolist()
    for index in range(len(begin) - 1):
        rows = slice(begin[index], begin[index + 1])
        if rows.start < rows.stop:
            attended, sequence_lse = causal_attention(
                q[rows], *context(index), scale, window, sinks, softcap, ahead
            )
            out[rows] = attended.to(q.dtype)
            if lse is not None:
                lse[rows] = sequence_lse
    return out


def slots_of(block_table: Tensor, seq_lens: Tensor, block_size: int, index: int) -> tuple[Tensor, Tensor]:
    """(blocks, offsets) int64 of the context of sequence `index` in a paged cache."""
    import torch

    position = torch.arange(int(seq_lens[index]), device=block_table.device)
    return block_table[index, position // block_size].long(), position % block_size
