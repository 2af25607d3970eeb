"""Grouped-query attention (Ainslie et al., 2023) over a paged cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.batch import Batch, ContextShard
from gristmill.runtime.config import ModelConfig, QueryScale
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.chunked import Chunks, chunked
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.context_parallel import ContextParallelAttention
from gristmill.runtime.layers.gathered_context import (
    FEWEST_GATHERED,
    HeadsOfRank,
    KeysAndValues,
    SpreadSequences,
    spread,
)
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.norm import norm_weight, weight_axis
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.qk_norm import HeadLayerNorm, Queries, Values, WholeNorm
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.layers.some_sequences import Sequences, others


class Attention:
    """Fused q/k/v projection; norm per head (Qwen3), rotary embedding and cache write in one call; attention; output projection.
    A norm over all heads (OLMo 2) is a call of its own, and one of values. A layer that reads the keys and values of another projects queries
    alone, and is called with that layer's cache.

    Attention sinks are used if the table has them. `scales` is (k_scale, v_scale) of a quantized cache with scales per tensor or head, from the
    checkpoint or 1.0; scales per token are part of the cache.

    Args:
        c: the configuration of the layer (`ModelConfig.of_layer`).
        window: number of keys that a query sees, its own included; 0 = all.
        chunk: tokens of a chunk, within which queries see keys; 0 = there are none.
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
        chunk: int = 0,
        reduce: bool = True,
    ) -> None:
        self.heads, self.head_dim = c.num_heads, c.head_dim
        self.projected = c.num_heads + (len(c.projected) - 1) * c.num_kv_heads
        reads_other = c.projected == "q"
        self.scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale
        self.score_cap = c.score_cap
        self.plans = plans
        self.rope = rope
        self.window, self.chunk = window, chunk
        if chunk % plans.block_size:
            raise ConfigError(
                f"attention within chunks of {chunk} tokens needs a block_size that divides them, got {plans.block_size}"
            )
        self.sinks = weights.optional(f"{name}.sinks")
        plans.own(self.sinks)
        form = plans.cache_format
        self.scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if form.quantized and not form.token_scales and not reads_other:
            self.scales = weights.cache_scales(f"{name}.qkv", c.num_kv_heads)
            plans.own(*self.scales)
        self.qkv = load_linear(plans, weights, f"{name}.qkv")
        self.gate = load_linear(plans, weights, f"{name}.gate") if c.attention_gate else None
        self.takes = self.qkv.takes if self.gate is None or self.gate.takes == self.qkv.takes else None
        self.q_norm = norm_weight(weights, f"{name}.q_norm", c) if c.qk_norm else None
        self.k_norm = norm_weight(weights, f"{name}.k_norm", c) if c.qk_norm and not reads_other else None
        if c.qk_norm_plain and rope.rotates:
            # Rotation changes no norm: before it, as here, or after it, as in the model's own code, it is the same.
            self.q_norm = self.k_norm = torch.ones(c.head_dim, dtype=plans.dtype, device=plans.device)
        scale = c.query_scale
        self.query_scale = None if scale is None or (scale.unrotated and rope.rotates) else scale
        self.whole_norm = WholeNorm(c, plans, weights, name) if c.qk_norm_whole else None
        self.head_norm = HeadLayerNorm(c, plans, weights, name) if c.qk_norm_heads else None
        self.eps = c.rms_eps
        plans.own(self.q_norm, self.k_norm)
        self.out = load_linear(plans, weights, f"{name}.out", reduce=reduce)
        self.queries = Queries(c, plans, self.q_norm, rope) if reads_other else None
        self.values = Values(c, plans) if not reads_other and (c.v_norm or c.projected == "qk") else None
        if not reads_other:
            self.write = plans.bind(
                "qk_norm_rope_cache",
                heads=c.num_heads,
                kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                rot=rope.rot,
                style=rope.style,
                norm=self.q_norm is not None,
                block_size=plans.block_size,
                x=plans.x,
                w="x" if self.q_norm is None else weight_axis(self.q_norm, plans),
                kv=form.kv,
                kv_scale=form.kv_scale,
            )
        mesh = plans.mesh
        self.context_parallel: ContextParallelAttention | None = None
        if mesh.context_parallel:
            self.context_parallel = ContextParallelAttention(plans, c.num_heads, c.head_dim, c.head_dim)
        bind = partial(
            plans.bind,
            "paged_attention",
            head_dim=c.head_dim,
            window=window,
            sinks=self.sinks is not None,
            softcap=c.score_cap > 0,
            block_size=plans.block_size,
            x=plans.x,
            kv=form.kv,
            kv_scale=form.kv_scale,
        )
        heads = c.num_heads * mesh.context_ranks
        self.attend = bind(heads=heads, kv_heads=c.num_kv_heads, lse=mesh.context_parallel)
        self.gather: HeadsOfRank | None = None
        if mesh.context_parallel and HeadsOfRank.serves(plans, c.num_heads, c.num_kv_heads, c.head_dim):
            self.gather = HeadsOfRank(plans, c.num_kv_heads, c.head_dim)
            self.attend_own = bind(heads=c.num_heads, kv_heads=self.gather.heads, lse=False)

    def __call__(self, x: Tensor | Codes, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor | PartialSum:
        """x [tokens, hidden], cache (K, V) or (K, V, k_scale, v_scale) -> [tokens, hidden]."""
        k_cache, v_cache, *token_scales = cache
        k_scale, v_scale = token_scales or self.scales
        qkv = self.qkv(x)
        tokens = qkv.shape[0]
        if self.whole_norm is not None:
            self.whole_norm(qkv)
        qkv = qkv.view(tokens, self.projected, self.head_dim)
        if self.head_norm is not None:
            self.head_norm(qkv)
        if self.values is not None:
            qkv = self.values(qkv)
        q = batch.empty("q", qkv, tokens, self.heads, self.head_dim)
        if self.queries is not None:
            self.queries(qkv, batch.positions, q)
        else:
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
        if self.query_scale is not None:
            q.mul_(batch.once("query_scale", partial(_factors, self.query_scale, batch.positions)))
        out = batch.empty("attended", qkv, tokens, self.heads, self.head_dim)
        batch.apart(partial(self._attend, q, k_cache, v_cache, k_scale, v_scale, out))
        attended = out.view(tokens, -1)
        return self.out(attended if self.gate is None else attended * self.gate(x).sigmoid_())

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
        shard = batch.context_shard
        if shard is not None and self.context_parallel is not None:
            self._attend_spread(q, (k_cache, v_cache, k_scale, v_scale), out, batch, shard)
            return
        at: Batch | Chunks = batch
        if self.chunk:
            at = batch.once("chunks", partial(chunked, batch, self.chunk, self.plans.block_size))
        self._call(self.attend, q, (k_cache, v_cache, k_scale, v_scale), at, at.max_q, None, out)

    def _call(
        self,
        plan: BoundPlan,
        q: Tensor,
        cache: KeysAndValues,
        at: Batch | ContextShard | Chunks | Sequences,
        max_q: int,
        lse: Tensor | None,
        out: Tensor,
    ) -> None:
        k_cache, v_cache, k_scale, v_scale = cache
        plan(
            q,
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
            workspace=self.plans.workspace(plan, len(q)),
            k_scale=k_scale,
            v_scale=v_scale,
            softcap=self.score_cap,
            out=out,
        )

    def _attend_spread(
        self,
        q: Tensor,
        cache: KeysAndValues,
        out: Tensor,
        batch: Batch,
        shard: ContextShard,
    ) -> None:
        """As `_attend`, with a cache that is spread over ranks: sequences with several new tokens get their contexts from all of them."""
        mesh, rows = self.plans.mesh, slice(None)
        if self.gather is None or not batch.lengths:
            self._of_all_ranks(q, cache, out, rows, shard)
            return

        def divide() -> SpreadSequences:
            several = [i for i, (new, _) in enumerate(batch.lengths) if new >= FEWEST_GATHERED]
            return spread(batch, several, others(batch, several), mesh.world, self.plans.block_size)

        parts = batch.once("spread", divide)
        for part in parts.gathered:
            at = part.sequences
            own = self.gather.of_context(cache, part.blocks)
            attended = out[at.rows] if isinstance(at.rows, slice) else torch.empty_like(q[at.rows])
            self._call(self.attend_own, q[at.rows], own, at, at.max_q, None, attended)
            if not isinstance(at.rows, slice):
                out[at.rows] = attended
        if parts.rows is not None and parts.shard is not None:
            self._of_all_ranks(q, cache, out, parts.rows, parts.shard)

    def _of_all_ranks(
        self,
        q: Tensor,
        cache: KeysAndValues,
        out: Tensor,
        rows: slice | Tensor,
        shard: ContextShard,
    ) -> None:
        """The rows of q with the parts of their contexts where these are."""
        if self.context_parallel is None:
            raise RuntimeError("a context shard without context parallelism")
        out[rows] = self.context_parallel(
            q[rows],
            shard,
            lambda queries, attended, lse: self._call(self.attend, queries, cache, shard, 1, lse, attended),
        )


def _factors(scale: QueryScale, positions: Tensor) -> Tensor:
    """The factor of the queries at positions [tokens], float32 [tokens, 1, 1]."""
    steps = torch.floor((positions.float() + scale.shift) / scale.span)
    return (1 + scale.growth * torch.log1p(steps))[:, None, None]
