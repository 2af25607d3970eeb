"""Attention of encoders with a learned bias of the scores by relative position (Raffel et al., 2020, arXiv:1910.10683: T5).

The operation `varlen_attention` adds nothing to scores, so that this attention is torch's `scaled_dot_product_attention`, exact, with the bias as
its mask; sequences of one length that follow each other are computed together.
"""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.sequences import Sequences

FARTHEST = 128
"""The distance from which on there is one bucket on each side."""


class BiasedAttention:
    """Attention of each token to those of its sequence, in both directions, with a bias.

    Args:
        bias: of each head, added to the scaled score of a query at i and a key at j, [heads, positions, positions].
    """

    def __init__(self, c: ModelConfig, bias: Tensor) -> None:
        self.bias = bias
        self.scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale

    def __call__(self, qkv: Tensor, batch: Sequences) -> Tensor:
        """qkv [tokens, 3 heads, head_dim] -> [tokens, heads, head_dim]."""
        out, begin = qkv.new_empty(len(qkv), qkv.shape[1] // 3, qkv.shape[2]), 0
        for (length, seen), group in groupby(zip(batch.lengths, batch.seen or batch.lengths, strict=True)):
            count = sum(1 for _ in group)
            rows, begin = slice(begin, begin + count * length), begin + count * length
            bias = self.bias[:, :length, :length]
            if seen < length:
                bias = bias.clone()
                bias[:, :, seen:] = -math.inf
            q, k, v = qkv[rows].view(count, length, 3, -1, qkv.shape[2]).permute(2, 0, 3, 1, 4)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=self.scale)
            out[rows].view(count, length, -1, qkv.shape[2]).copy_(attended.transpose(1, 2))
        return out


def load_position_bias(c: ModelConfig, plans: Plans, weights: Weights) -> Tensor | None:
    """The bias that all layers share, [heads of the rank, positions, positions], of the table [buckets, heads]; None without such a table."""
    whole = weights.optional("position_bias")
    if whole is None:
        return None
    table = whole[:, plans.mesh.rank * c.num_heads :][:, : c.num_heads]
    places = torch.arange(c.max_position)
    bias = table[bucket(places[None] - places[:, None], len(table)).to(table.device)].permute(2, 0, 1)
    plans.own(bias := bias.contiguous())
    return bias


def bucket(ahead: Tensor, buckets: int) -> Tensor:
    """The bucket of keys that are `ahead` of their query, negative = before it, int64.

    The first half of the buckets is of keys before the query and its own, the second of those after it. Of each, one half has a bucket for
    each distance, the other for ranges that grow by a factor up to `FARTHEST`. In float32, which decides at the edges.
    """
    side, exact = buckets // 2, buckets // 4
    distance = ahead.abs()
    ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(FARTHEST / exact)
    far = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
    return torch.where(distance < exact, distance, far) + side * (ahead > 0)
