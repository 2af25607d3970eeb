"""Norms of q, k and v that are not in the call which rotates and writes them: over all heads of a token (OLMo 2, arXiv:2501.00656; MiniMax-M2),
of each head with weights in float32, LayerNorm of each head, and of values and of queries alone (Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.norm import weight_axis
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope


class WholeNorm:
    """One norm over all heads of q, one over those of k. Ranks that share the heads add up their sums of squares."""

    def __init__(self, c: ModelConfig, plans: Plans, weights: Weights, name: str) -> None:
        self.weights = [weights.tensor(f"{name}.{part}_norm") for part in "qk"]
        plans.own(*self.weights)
        self.eps, self.mesh = c.rms_eps, plans.mesh
        self.sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        self.plans, self.sum = [], None
        if self.mesh.world == 1:
            self.plans = [plans.bind("rms_norm", n=size, x=plans.x) for size in self.sizes]
        else:
            self.sum = plans.bind("all_reduce", n=2, x="fp32", world=self.mesh.world)

    def __call__(self, qkv: Tensor) -> None:
        """qkv [tokens, q, k and v of all heads], of which q and k are normalized in place."""
        parts = qkv.split([*self.sizes, qkv.shape[1] - sum(self.sizes)], 1)[:2]
        if self.sum is None:
            for plan, part, weight in zip(self.plans, parts, self.weights, strict=True):
                plan(part, weight, self.eps, part)
            return
        squares = torch.stack([part.float().square().sum(1) for part in parts], 1)
        self.sum(squares, self.mesh.group, self.mesh.world)
        # Heads that several ranks have count as often in the sum as in the size.
        for part, weight, size, total in zip(parts, self.weights, self.sizes, squares.T, strict=True):
            scale = (total / (size * self.mesh.world) + self.eps).rsqrt()
            part.copy_(part.float() * scale[:, None] * weight.float())


class HeadLayerNorm:
    """LayerNorm of each head of q and k, with weights [heads, head_dim] of its own: computed in float32 and rounded once."""

    def __init__(self, c: ModelConfig, plans: Plans, weights: Weights, name: str) -> None:
        self.weights = [weights.tensor(f"{name}.{part}_norm").float() for part in "qk"]
        self.ones = torch.ones(c.head_dim, dtype=torch.float32, device=plans.device)
        plans.own(*self.weights, self.ones)
        self.counts, self.eps = (c.num_heads, c.num_kv_heads), c.rms_eps
        self.plan = plans.bind("layer_norm", n=c.head_dim, x="fp32", bias=False)

    def __call__(self, qkv: Tensor) -> None:
        """qkv [tokens, heads of q, k and v, head_dim], of which q and k are normalized in place."""
        for part, weight in zip(qkv.split([*self.counts, self.counts[1]], 1), self.weights, strict=False):
            values = part.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            self.plan(values, self.ones, None, self.eps, None, values)
            part.copy_(values.mul_(weight))


class WideHeadNorm:
    """A norm of each head of q and k, with weights [head_dim] in float32."""

    def __init__(self, c: ModelConfig, plans: Plans, *weights: Tensor) -> None:
        self.weights, self.counts, self.eps = weights, (c.num_heads, c.num_kv_heads), c.rms_eps
        plans.own(*weights)
        self.plan = plans.bind("rms_norm", n=c.head_dim, x=plans.x, w=weight_axis(weights[0], plans))

    def __call__(self, qkv: Tensor) -> None:
        """qkv [tokens, heads of q, k and v, head_dim], of which q and k are normalized in place."""
        parts = qkv.split([*self.counts, qkv.shape[1] - sum(self.counts)], 1)
        for part, weight in zip(parts, self.weights, strict=False):
            values = part.contiguous()
            self.plan(values, weight, self.eps, values)
            part.copy_(values)


class Values:
    """Values as the cache takes them: normalized by head without weights if the model does so; made of the keys, as they are before their norm,
    where there is no projection of values."""

    def __init__(self, c: ModelConfig, plans: Plans) -> None:
        self.kv_heads, self.eps = c.num_kv_heads, c.rms_eps
        self.of_keys = c.projected == "qk"
        self.plan = plans.bind("rms_norm", n=c.head_dim, x=plans.x) if c.v_norm else None
        self.ones = torch.ones(c.head_dim, dtype=plans.dtype, device=plans.device)
        plans.own(self.ones)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [tokens, projected heads, head_dim], which may be overwritten -> [tokens, heads of q, k and v, head_dim]."""
        given = rows[:, -self.kv_heads :]
        values = given
        if self.plan is not None:
            values = torch.empty_like(given, memory_format=torch.contiguous_format)
            self.plan(given.contiguous(), self.ones, self.eps, values)
        if self.of_keys:
            return torch.cat((rows, values), 1)
        given.copy_(values)
        return rows


class Queries:
    """Norm of each head and rotation of queries alone, in a layer that reads the keys and values of another.

    Args:
        weight: of the norm, [head_dim] in the model's dtype or float32; None = no norm.
    """

    def __init__(self, c: ModelConfig, plans: Plans, weight: Tensor | None, rope: Rope) -> None:
        self.weight, self.eps, self.rope = weight, c.rms_eps, rope
        self.norm = None
        if weight is not None:
            self.norm = plans.bind("rms_norm", n=c.head_dim, x=plans.x, w=weight_axis(weight, plans))
        heads = {"hq": c.num_heads, "hk": 0, "d": c.head_dim}
        self.rotate = plans.bind("rotary_embedding", **heads, rot=rope.rot, style=rope.style, x=plans.x)

    def __call__(self, rows: Tensor, positions: Tensor, q: Tensor) -> None:
        """rows [tokens, heads, head_dim], contiguous -> q, of the same shape."""
        if self.norm is None:
            q.copy_(rows)
        else:
            self.norm(rows, self.weight, self.eps, q)
        self.rotate(q, None, positions, self.rope.table, self.rope.interleaved)
