"""Attention over whole sequences, which need no cache: of encoders in both directions, of decoders that pool causal."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.linear import load_linear
from gristmill.runtime.layers.norm import norm_weight
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.qk_norm import WholeNorm, WideHeadNorm
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.sequences import Sequences


class WholeAttention:
    """Rotary embedding of q and k, and attention of each token to those of its sequence.

    Args:
        rope: None = no rotation.
        left, right: keys before and after its own that a token sees; -1 = all.
    """

    def __init__(self, c: ModelConfig, plans: Plans, rope: Rope | None, left: int, right: int) -> None:
        self.heads, self.kv_heads = c.num_heads, c.num_kv_heads
        self.scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale
        self.left, self.right, self.rope = left, right, rope
        self.rotate = None
        if rope is not None:
            heads = {"hq": c.num_heads, "hk": c.num_kv_heads, "d": c.head_dim}
            self.rotate = plans.bind("rotary_embedding", **heads, rot=rope.rot, style=rope.style, x=plans.x)
        self.attend = plans.bind(
            "varlen_attention",
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            qk_dim=c.head_dim,
            v_dim=c.head_dim,
            x=plans.x,
            window_left=left,
            window_right=right,
        )

    def __call__(self, qkv: Tensor, batch: Sequences) -> Tensor:
        """qkv [tokens, heads + 2 kv_heads, head_dim], of which q and k are rotated in place -> [tokens, heads, head_dim]."""
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.rotate is not None and self.rope is not None:
            self.rotate(q, k, batch.positions, self.rope.table, self.rope.interleaved)
        out: Tensor = qkv.new_empty(q.shape)
        bounds = (batch.starts, batch.starts, batch.longest, batch.longest)
        self.attend(q, k, v, *bounds, self.scale, None, self.left, self.right, out)
        if batch.seen is not None:
            attend_to_seen(q, k, v, batch, self.scale, (self.left, self.right), out)
        return out


def attend_to_seen(
    q: Tensor, k: Tensor, v: Tensor, batch: Sequences, scale: float, window: tuple[int, int], out: Tensor
) -> None:
    """Attention again, to the first tokens alone, of sequences of which not all tokens are seen: queries of late interaction, which are short.

    Args:
        q, k, v: [tokens, heads, head_dim] after the rotation.
        window: keys before and after its own that a token sees; -1 = all.
        out: [tokens, heads, head_dim], of which the rows of these sequences are written.
    """
    begin = 0
    for length, seen in zip(batch.lengths, batch.seen or batch.lengths, strict=True):
        rows, begin = slice(begin, begin + length), begin + length
        if seen == length:
            continue
        place = torch.arange(length, device=q.device)
        ahead = place[None] - place[:, None]
        visible = (place < seen).expand(length, length)
        visible = (
            visible & ((window[0] < 0) | (ahead >= -window[0])) & ((window[1] < 0) | (ahead <= window[1]))
        )
        queries, keys, values = (part[rows].transpose(0, 1) for part in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, visible, scale=scale, enable_gqa=True
        )
        out[rows] = attended.transpose(0, 1)


class DecoderAttention:
    """The attention of a decoder over whole sequences: what `Attention` computes, without a cache.

    Attributes:
        takes: the format of codes that it takes instead of floats; None = floats alone.
    """

    def __init__(
        self, c: ModelConfig, plans: Plans, weights: Weights, name: str, rope: Rope, window: int
    ) -> None:
        if (
            weights.has(f"{name}.sinks")
            or c.score_cap
            or c.chunks
            or c.query_scale
            or c.qk_norm_plain
            or c.qk_norm_heads
            or c.v_norm
            or c.projected != "qkv"
        ):
            raise UsageError(
                f"{c.architecture}: attention sinks and gates, caps of scores, chunks, LayerNorm of heads, norms without weights, factors of "
                "queries, and keys or values of other projections or layers need a KV cache; such a model cannot pool"
            )
        self.heads = c.num_heads + 2 * c.num_kv_heads
        self.head_dim = c.head_dim
        self.qkv = load_linear(plans, weights, f"{name}.qkv")
        self.takes = self.qkv.takes
        self.head_norm = None
        if c.qk_norm:
            both = (norm_weight(weights, f"{name}.{part}_norm", c).float() for part in "qk")
            self.head_norm = WideHeadNorm(c, plans, *both)
        self.whole_norm = WholeNorm(c, plans, weights, name) if c.qk_norm_whole else None
        sides = (window or -1, window or -1) if c.bidirectional else (window - 1 if window else -1, 0)
        self.attend = WholeAttention(c, plans, rope, *sides)
        self.out = load_linear(plans, weights, f"{name}.out")

    def __call__(self, x: Tensor | Codes, batch: Sequences, cache: tuple[Tensor, ...]) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; there is no `cache`."""
        rows = self.qkv(x)
        if self.whole_norm is not None:
            self.whole_norm(rows)
        qkv = rows.view(len(rows), self.heads, self.head_dim)
        if self.head_norm is not None:
            self.head_norm(qkv)
        return self.out(self.attend(qkv, batch).view(len(rows), -1))
