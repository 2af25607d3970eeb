"""Grouped-query attention (Ainslie et al., 2023) over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.linear import load_linear
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.loader.weights import Weights


class Attention:
    """Fused q/k/v projection; in Qwen3 a norm per head; rotary embedding; cache write; attention; output projection.

    window: keys that a query sees, including its own; 0 = all. Sinks are used if the table has them. scales: (k_scale, v_scale) of a
    quantized cache with scales per tensor or head, from the checkpoint or 1.0; scales per token are part of the cache.
    """

    def __init__(
        self, c: ModelConfig, plans: Plans, weights: Weights, name: str, rope: Rope, window: int = 0
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        self.plans = plans
        self.rope = rope
        self.window = window
        self.sinks = weights.optional(f"{name}.sinks")
        plans.own(self.sinks)
        form = plans.cache_format
        self.scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if form.quantized and not form.token_scales:
            self.scales = weights.cache_scales(f"{name}.qkv", c.num_kv_heads)
            plans.own(*self.scales)
        self.qkv = load_linear(plans, weights, f"{name}.qkv")
        self.q_norm = self.k_norm = None
        if c.qk_norm:
            self.q_norm = RMSNorm(plans, weights.tensor(f"{name}.q_norm"), c.rms_eps)
            self.k_norm = RMSNorm(plans, weights.tensor(f"{name}.k_norm"), c.rms_eps)
        self.out = load_linear(plans, weights, f"{name}.out")
        self.write = plans.bind(
            "reshape_and_cache",
            h=c.num_kv_heads,
            d=c.head_dim,
            dv=c.head_dim,
            block_size=plans.block_size,
            x=plans.x,
            kv=form.kv,
            kv_scale=form.kv_scale,
        )
        self.attend = plans.bind(
            "paged_attention",
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            window=window,
            sinks=self.sinks is not None,
            block_size=plans.block_size,
            x=plans.x,
            kv=form.kv,
            kv_scale=form.kv_scale,
        )

    def __call__(self, x: Tensor, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor:
        """x [tokens, hidden], cache (K, V) or (K, V, k_scale, v_scale) -> [tokens, hidden]."""
        k_cache, v_cache, *token_scales = cache
        k_scale, v_scale = token_scales or self.scales
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(-1, self.head_dim)).view(k.shape)
        self.rope(q, k, batch.positions)
        self.write(k, v, k_cache, v_cache, batch.slots, k_scale, v_scale)
        out = q.new_empty(q.shape)
        self.attend(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.query_start,
            batch.seq_lens,
            batch.max_q,
            batch.max_ctx,
            self.scale,
            self.window,
            self.sinks,
            None,
            self.plans.scratch(self.attend, x.shape[0]),
            k_scale,
            v_scale,
            out,
        )
        return self.out(out.view(x.shape[0], -1))
