"""The meaning of causal attention for one sequence, in float32: what every attention reference is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def causal_attention(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [n, heads, Dk], keys [c, kv_heads, Dk], values [c, kv_heads, Dv] -> (out [n, heads, Dv], lse [n, heads]), float32.

    The n queries are the last of the c positions. softmax(scale · q·k + mask) · v, the query at position p seeing keys 0..p or,
    with window > 0, the last `window` of them; query head h reads KV head h // (heads / kv_heads). sinks [heads]: one
    more logit a head in the denominator, without a value. lse is the natural logarithm of the denominator; a query that
    sees nothing gives 0 and lse -inf.
    """
    import torch

    count, heads = q.shape[0], q.shape[1]
    context, kv_heads = keys.shape[0], keys.shape[1]
    keys = keys.float().repeat_interleave(heads // kv_heads, dim=1)
    values = values.float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    position = torch.arange(context, device=q.device)
    own = torch.arange(context - count, context, device=q.device)[:, None]
    seen = position <= own
    if window > 0:
        seen &= position > own - window
    scores = scores.masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks[:, None, None].float())
    weights = (scores - total).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), total[..., 0].T
