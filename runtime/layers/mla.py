"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) over a paged cache of latents.

The cache holds per token the normalized latent c and one rotated key k_r that all heads share. Keys and values of a head are
linear in c: k = W_k c, v = W_v c. Two forms are equal up to rounding:

    absorbed     q·k = (W_kᵀ q)·c, so queries are projected to the latent space, attention reads the cache directly, and W_v is
                 applied to its output. Reads the least memory: for decode, and for prompt chunks after cached tokens.
    un-absorbed  keys and values of the new tokens are materialized. A third of the arithmetic: for prompts without
                 cached tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch
from gristmill.runtime.config import MlaConfig, ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.head_products import HeadProducts
from gristmill.runtime.layers.linear import Linear, Summand, load_linear
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.layers.spread_attention import SpreadAttention
from gristmill.runtime.loader.weights import Weights


class LatentAttention:
    """Down-projections to latents, rotary embedding, cache write, attention, output projection. summed: as of `load_linear`."""

    def __init__(
        self,
        c: ModelConfig,
        mla: MlaConfig,
        plans: Plans,
        weights: Weights,
        name: str,
        rope: Rope,
        *,
        summed: bool = True,
    ) -> None:
        if plans.cache_format.quantized:
            raise UsageError(
                f"kv_dtype {plans.cache_format.name!r}: a latent cache (MLA) is not quantized; use kv_dtype='auto'"
            )
        self.mla, self.heads, self.plans, self.rope = mla, c.num_heads, plans, rope
        self.scale = mla.qk_dim**-0.5 * c.rope.softmax_factor
        self.latents = load_linear(plans, weights, f"{name}.latents")
        self.q_norm = None
        if mla.q_lora_rank:
            # transformers uses the default epsilon for the norms of latents, not the configuration's.
            self.q_norm = RMSNorm(plans, weights.tensor(f"{name}.q_norm"), LATENT_EPS)
        self.q = load_linear(plans, weights, f"{name}.q")
        self.kv_norm = RMSNorm(plans, weights.tensor(f"{name}.kv_norm"), LATENT_EPS)
        kv = weights.linear(f"{name}.kv")
        self.kv = Linear(plans, kv)
        self.kv.target = f"{name}.kv"
        per_head = kv.dequantize(plans.dtype).view(self.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        self.to_latent = HeadProducts(plans, per_head[:, : mla.nope_dim])
        self.to_values = HeadProducts(plans, per_head[:, mla.nope_dim :].transpose(1, 2))
        # The two forms round differently, and which one a prompt gets would depend on the requests beside it.
        self.one_form = plans.policy.batch_invariant
        self.out = load_linear(plans, weights, f"{name}.out", summed=summed)
        self.rotate = plans.bind(
            "rotary_embedding",
            hq=c.num_heads,
            hk=1,
            d=mla.rope_dim,
            rot=rope.rot,
            style=rope.style,
            x=plans.x,
        )
        self.write = plans.bind(
            "reshape_and_cache_mla", d=mla.latent_dim, block_size=plans.block_size, x=plans.x
        )
        self.attend = plans.bind(
            "mla_attention",
            heads=c.num_heads,
            latent_dim=mla.kv_lora_rank,
            rope_dim=mla.rope_dim,
            block_size=plans.block_size,
            x=plans.x,
        )
        mesh = plans.mesh
        self.spread = SpreadAttention(plans, mla, c.num_heads) if mesh.spreads_context else None
        self.attend_new = plans.bind(
            "varlen_attention",
            heads=c.num_heads,
            kv_heads=c.num_heads,
            qk_dim=mla.qk_dim,
            v_dim=mla.v_dim,
            x=plans.x,
        )

    def __call__(self, x: Tensor, batch: Batch, cache: Tensor) -> Tensor | Summand:
        """x [tokens, hidden], cache [blocks, block_size, latent_dim] -> [tokens, hidden]."""
        mla, tokens = self.mla, x.shape[0]
        down = self.latents(x)
        rank = mla.q_lora_rank or 0
        q = self.q(self.q_norm(down[:, :rank]) if self.q_norm else x).view(tokens, self.heads, mla.qk_dim)
        latent = torch.empty_like(down[:, rank:])
        latent[:, : mla.kv_lora_rank] = self.kv_norm(down[:, rank : rank + mla.kv_lora_rank])
        latent[:, mla.kv_lora_rank :] = down[:, rank + mla.kv_lora_rank :]
        self.rotate(
            q[..., mla.nope_dim :],
            latent[:, None, mla.kv_lora_rank :],
            batch.positions,
            self.rope.table,
            self.rope.interleaved,
        )
        self.write(latent, cache, batch.slots)
        fresh = batch.fresh and not self.one_form
        attended = self._prefill(q, latent, batch) if fresh else self._absorbed(q, batch, cache)
        return self.out(attended.view(tokens, self.heads * mla.v_dim))

    def _absorbed(self, q: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """q [tokens, heads, qk_dim] -> [tokens, heads, v_dim], with all keys and values from the cache."""
        mla, tokens = self.mla, q.shape[0]
        query = q.new_empty(tokens, self.heads, mla.latent_dim)
        query[..., : mla.kv_lora_rank] = self.to_latent(q[..., : mla.nope_dim])
        query[..., mla.kv_lora_rank :] = q[..., mla.nope_dim :]
        if self.spread is not None and batch.spread is not None:
            return self.to_values(self.spread(query, cache, batch.spread, self.scale)).contiguous()
        out = q.new_empty(tokens, self.heads, mla.kv_lora_rank)
        self.attend(
            query,
            cache,
            batch.block_table,
            batch.query_start,
            batch.seq_lens,
            batch.max_q,
            batch.max_ctx,
            self.scale,
            mla.kv_lora_rank,
            None,
            self.plans.scratch(self.attend, tokens),
            out,
        )
        return self.to_values(out).contiguous()

    def _prefill(self, q: Tensor, latent: Tensor, batch: Batch) -> Tensor:
        """The same from keys and values of the new tokens only, which are the whole context."""
        mla, tokens = self.mla, q.shape[0]
        kv = self.kv(latent[:, : mla.kv_lora_rank]).view(tokens, self.heads, mla.nope_dim + mla.v_dim)
        k = q.new_empty(q.shape)
        k[..., : mla.nope_dim] = kv[..., : mla.nope_dim]
        k[..., mla.nope_dim :] = latent[:, None, mla.kv_lora_rank :]
        v = kv[..., mla.nope_dim :]
        out = q.new_empty(tokens, self.heads, mla.v_dim)
        self.attend_new(
            q, k, v, batch.query_start, batch.query_start, batch.max_q, batch.max_q, self.scale, None, out
        )
        return out


LATENT_EPS = 1e-6
"""Epsilon of the norms of latents: a constant in the model's own code, independent of rms_norm_eps."""
