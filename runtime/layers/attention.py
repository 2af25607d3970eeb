"""Grouped-query attention (Ainslie et al., 2023) over a paged cache."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.batch import Batch, ContextShard
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.context_parallel import ContextParallelAttention
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope


class Attention:
    """Fused q/k/v projection; norm per head (Qwen3), rotary embedding and cache write in one call; attention; output projection.

    Attention sinks are used if the table has them. `scales` is (k_scale, v_scale) of a quantized cache with scales per tensor or head, from the
    checkpoint or 1.0; scales per token are part of the cache.

    Args:
        window: number of keys that a query sees, its own included; 0 = all.
        reduce: as in `load_linear`.

    Attributes:
        takes: the format of codes that it takes instead of floats; None = floats alone.
    """

    def __init__(
        self,
        c: ModelConfig,
        plans: Plans,
        weights: Weights,
        name: str,
        rope: Rope,
        window: int = 0,
        *,
        reduce: bool = True,
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
        self.takes = self.qkv.takes
        self.q_norm = weights.tensor(f"{name}.q_norm") if c.qk_norm else None
        self.k_norm = weights.tensor(f"{name}.k_norm") if c.qk_norm else None
        self.eps = c.rms_eps
        plans.own(self.q_norm, self.k_norm)
        self.out = load_linear(plans, weights, f"{name}.out", reduce=reduce)
        self.write = plans.bind(
            "qk_norm_rope_cache",
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rot=rope.rot,
            style=rope.style,
            norm=c.qk_norm,
            block_size=plans.block_size,
            x=plans.x,
            kv=form.kv,
            kv_scale=form.kv_scale,
        )
        mesh = plans.mesh
        self.context_parallel: ContextParallelAttention | None = None
        if mesh.context_parallel:
            self.context_parallel = ContextParallelAttention(plans, c.num_heads, c.head_dim, c.head_dim)
        self.attend = plans.bind(
            "paged_attention",
            heads=c.num_heads * mesh.context_ranks,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            window=window,
            sinks=self.sinks is not None,
            lse=mesh.context_parallel,
            block_size=plans.block_size,
            x=plans.x,
            kv=form.kv,
            kv_scale=form.kv_scale,
        )

    def __call__(self, x: Tensor | Codes, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor | PartialSum:
        """x [tokens, hidden], cache (K, V) or (K, V, k_scale, v_scale) -> [tokens, hidden]."""
        k_cache, v_cache, *token_scales = cache
        k_scale, v_scale = token_scales or self.scales
        qkv = self.qkv(x)
        tokens = qkv.shape[0]
        qkv = qkv.view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        q = batch.empty("q", qkv, tokens, self.heads, self.head_dim)
        self.write(
            qkv,
            self.q_norm,
            self.k_norm,
            self.eps,
            batch.positions,
            self.rope.table,
            k_cache,
            v_cache,
            batch.slots,
            self.rope.interleaved,
            k_scale,
            v_scale,
            q=q,
        )
        out = batch.empty("attended", qkv, tokens, self.heads, self.head_dim)
        batch.apart(partial(self._attend, q, k_cache, v_cache, k_scale, v_scale, out))
        return self.out(out.view(tokens, -1))

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        out: Tensor,
        batch: Batch,
    ) -> None:
        """Attention of the tokens of `batch`, the first rows of q, into those of out."""
        tokens = len(batch.tokens)
        if tokens < len(q):
            q, out = q[:tokens], out[:tokens]

        def attend(
            queries: Tensor, at: Batch | ContextShard, max_q: int, lse: Tensor | None, attended: Tensor
        ) -> None:
            self.attend(
                queries,
                k_cache,
                v_cache,
                at.block_table,
                at.query_start,
                at.seq_lens,
                max_q,
                at.max_ctx,
                self.scale,
                self.window,
                self.sinks,
                lse,
                workspace=self.plans.workspace(self.attend, tokens),
                k_scale=k_scale,
                v_scale=v_scale,
                out=attended,
            )

        shard = batch.context_shard
        if shard is None or self.context_parallel is None:
            attend(q, batch, batch.max_q, None, out)
            return
        out.copy_(
            self.context_parallel(
                q, shard, lambda queries, attended, lse: attend(queries, shard, 1, lse, attended)
            )
        )
