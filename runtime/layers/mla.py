"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) over a paged cache of latents.

The cache holds per token the normalized latent c and one rotated key k_r that all heads share. Keys and values of a head are
linear in c: k = W_k c, v = W_v c. Two forms are equal up to rounding:

    absorbed     q·k = (W_kᵀ q)·c, so queries are projected to the latent space, attention reads the cache directly, and W_v is
                 applied to its output. Reads the least memory: for decode, and for few new tokens.
    un-absorbed  keys and values of the whole context are materialized. A third of the arithmetic of attention: for prompts, and for
                 their chunks after cached tokens.

`latent_forms` chooses for each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.packing import plan_layouts
from gristmill.quant import QuantTensor, pack
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.batch import Batch, ContextShard
from gristmill.runtime.config import MlaConfig, ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.context_parallel import ContextParallelAttention
from gristmill.runtime.layers.gathered_context import LatentsOfAll
from gristmill.runtime.layers.latent_forms import Expanded, split, split_spread
from gristmill.runtime.layers.linear import Linear, PartialSum, load_linear
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.layers.some_sequences import Sequences, whole

NO_EPILOGUE = (None, False, 0.0, 0.0)
"""No bias, no clamped activation."""


class HeadProducts:
    """A product per head: [tokens, heads, k] times [heads, k, n] -> [tokens, heads, n].

    It is torch.bmm, whose order of additions may depend on the number of rows; under a batch-invariant policy it is `grouped_linear`, with
    heads as experts.
    """

    def __init__(self, plans: Plans, weight: Tensor) -> None:
        self.heads, self.k, self.n = weight.shape
        self.plan = None
        if plans.policy.batch_invariant:
            problem = plans.problem(
                "grouped_linear",
                e=self.heads,
                n=self.n,
                k=self.k,
                x=plans.x,
                w=plans.x,
                epilogue="none",
                gather=0,
            )
            layout = min(plan_layouts(plans.resolver, problem))
            self.plan = plans.bind_packed(problem, frozenset((layout,)))
            self.weight = pack(QuantTensor.from_dense(weight.transpose(1, 2).contiguous()), layout).tensors
        else:
            self.weight = [weight.contiguous()]
        plans.own(*self.weight)

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor:
        """x [tokens, heads, k] -> out [tokens, heads, n], both of any strides."""
        rows = x.transpose(0, 1)
        if self.plan is None:
            torch.bmm(rows, self.weight[0], out=out.transpose(0, 1))
            return out
        tokens = x.shape[0]
        ends = torch.arange(0, self.heads * tokens + 1, max(tokens, 1), dtype=torch.int32, device=x.device)
        products = x.new_empty(self.heads * tokens, self.n)
        self.plan(
            rows.contiguous().view(self.heads * tokens, self.k),
            self.weight,
            ends,
            None,
            1,
            False,
            self.n,
            *NO_EPILOGUE,
            out=products,
        )
        return out.copy_(products.view(self.heads, tokens, self.n).transpose(0, 1))

    def of_all(self, x: Tensor, heads: slice, *, out: Tensor, transposed: bool = False) -> None:
        """x [rows, k] times the matrices of some heads, into out [rows, heads, n] of any strides; transposed, x [rows, n] into [rows, heads, k].

        Not under a batch-invariant policy, which packs the matrices.
        """
        weight = self.weight[0][heads]
        some = weight.transpose(1, 2) if transposed else weight
        torch.bmm(x.expand(len(some), *x.shape), some, out=out.transpose(0, 1))


class LatentAttention:
    """Down-projections to latents, rotary embedding, cache write, attention, output projection. `reduce` is as in `load_linear`."""

    def __init__(
        self,
        c: ModelConfig,
        mla: MlaConfig,
        plans: Plans,
        weights: Weights,
        name: str,
        rope: Rope,
        *,
        reduce: bool = True,
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
        self.kv = Linear(plans, kv, target=f"{name}.kv")
        per_head = kv.dequantize(plans.dtype).view(self.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        self.to_latent = HeadProducts(plans, per_head[:, : mla.nope_dim])
        self.to_values = HeadProducts(plans, per_head[:, mla.nope_dim :].transpose(1, 2))
        # The two forms round differently, and which one a prompt gets would depend on the other requests of the step.
        self.one_form = plans.policy.batch_invariant
        self.out = load_linear(plans, weights, f"{name}.out", reduce=reduce)
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
        self.context_parallel: ContextParallelAttention | None = None
        if mesh.context_parallel:
            self.context_parallel = ContextParallelAttention(
                plans, c.num_heads, mla.latent_dim, mla.kv_lora_rank
            )
            self.gather = None if self.one_form else LatentsOfAll(plans, mla.latent_dim)
            self.attend_part = plans.bind(
                "mla_attention",
                heads=c.num_heads * mesh.world,
                latent_dim=mla.kv_lora_rank,
                rope_dim=mla.rope_dim,
                block_size=plans.block_size,
                x=plans.x,
                lse=True,
            )
        self.attend_new = self._attend_new(c.num_heads)
        self.few = FEW_HEADS if c.num_heads % FEW_HEADS == 0 else c.num_heads
        self.attend_few = self._attend_new(self.few)

    def __call__(self, x: Tensor, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor | PartialSum:
        """x [tokens, hidden], cache ([blocks, block_size, latent_dim],) -> [tokens, hidden]."""
        (latents,) = cache
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
        self.write(latent, latents, batch.slots)
        attended = self._attend(q, latent, batch, latents)
        return self.out(attended.view(tokens, self.heads * mla.v_dim))

    def _attend(self, q: Tensor, latent: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """q [tokens, heads, qk_dim], latent [tokens, latent_dim] of the new tokens -> [tokens, heads, v_dim], contiguous."""
        if self.context_parallel is not None and batch.context_shard is not None:
            return self._attend_spread(self.context_parallel, q, latent, batch, batch.context_shard, cache)
        expanded: Expanded | None = None
        absorbed: Sequences | None = None
        if batch.lengths and not self.one_form:
            forms = batch.once("latent forms", lambda: split(batch, self.mla, self.plans.block_size))
            expanded, absorbed = forms.expanded, forms.absorbed
        if expanded is None:
            return self._absorbed(q, whole(batch), cache)
        if absorbed is None:
            return self._expanded(q, latent, expanded, cache)
        out = q.new_empty(q.shape[0], self.heads, self.mla.v_dim)
        out[expanded.rows] = self._expanded(q[expanded.rows], latent[expanded.rows], expanded, cache)
        out[absorbed.rows] = self._absorbed(q[absorbed.rows], absorbed, cache)
        return out

    def _attend_spread(
        self,
        attention: ContextParallelAttention,
        q: Tensor,
        latent: Tensor,
        batch: Batch,
        shard: ContextShard,
        cache: Tensor,
    ) -> Tensor:
        """As `_attend`, with a cache that is spread over ranks."""
        if self.gather is None or not batch.lengths:
            return self._of_all_ranks(attention, q, shard, cache)
        mesh, size = self.plans.mesh, self.plans.block_size
        forms = batch.once("latent forms", lambda: split_spread(batch, self.mla, mesh.world, size))
        out = q.new_empty(q.shape[0], self.heads, self.mla.v_dim)
        if forms.new is not None:
            rows = forms.new.rows
            out[rows] = self._expanded(q[rows], latent[rows], forms.new, cache)
        for part, expanded in zip(forms.parts.gathered, forms.cached, strict=True):
            rows = expanded.rows
            out[rows] = self._expanded(q[rows], latent[rows], expanded, self.gather(cache, part.blocks))
        if forms.parts.rows is not None and forms.parts.shard is not None:
            rows = forms.parts.rows
            out[rows] = self._of_all_ranks(attention, q[rows], forms.parts.shard, cache)
        return out

    def _of_all_ranks(
        self, attention: ContextParallelAttention, q: Tensor, shard: ContextShard, cache: Tensor
    ) -> Tensor:
        """q [tokens, heads, qk_dim] -> [tokens, heads, v_dim], with keys and values from the caches of all ranks."""

        def attend(queries: Tensor, out: Tensor, lse: Tensor) -> None:
            self.attend_part(
                queries,
                cache,
                shard.block_table,
                shard.query_start,
                shard.seq_lens,
                1,
                shard.max_ctx,
                self.scale,
                self.mla.kv_lora_rank,
                lse,
                self.plans.workspace(self.attend_part, queries.shape[0]),
                out=out,
            )

        return self._values(attention(self._latent_queries(q), shard, attend))

    def _latent_queries(self, q: Tensor) -> Tensor:
        """q [tokens, heads, qk_dim] -> [tokens, heads, latent_dim], with the projection of the keys."""
        mla = self.mla
        query = q.new_empty(q.shape[0], self.heads, mla.latent_dim)
        self.to_latent(q[..., : mla.nope_dim], out=query[..., : mla.kv_lora_rank])
        query[..., mla.kv_lora_rank :] = q[..., mla.nope_dim :]
        return query

    def _values(self, attended: Tensor) -> Tensor:
        """attended [tokens, heads, kv_lora_rank] -> [tokens, heads, v_dim], contiguous."""
        return self.to_values(attended, out=attended.new_empty(*attended.shape[:2], self.mla.v_dim))

    def _absorbed(self, q: Tensor, sequences: Sequences, cache: Tensor) -> Tensor:
        """q [tokens, heads, qk_dim] -> [tokens, heads, v_dim], with all keys and values from the cache."""
        mla, tokens = self.mla, q.shape[0]
        out = q.new_empty(tokens, self.heads, mla.kv_lora_rank)
        self.attend(
            self._latent_queries(q),
            cache,
            sequences.block_table,
            sequences.query_start,
            sequences.seq_lens,
            sequences.max_q,
            sequences.max_ctx,
            self.scale,
            mla.kv_lora_rank,
            None,
            self.plans.workspace(self.attend, tokens),
            out=out,
        )
        return self._values(out)

    def _expanded(self, q: Tensor, latent: Tensor, sequences: Expanded, cache: Tensor) -> Tensor:
        """The same from keys and values of every token of the contexts: of some heads at a time where all of them would take much more
        memory than a step of new tokens."""
        mla, tokens, new = self.mla, q.shape[0], sequences.slots is None
        context = latent if sequences.slots is None else cache.view(-1, mla.latent_dim)[sequences.slots]
        out = q.new_empty(tokens, self.heads, mla.v_dim)
        count, attend = self.heads, self.attend_new
        if not new and len(context) * self.heads > LARGEST_EXPANDED:
            count, attend = self.few, self.attend_few
        for first in range(0, self.heads, count):
            heads = slice(first, first + count)
            k, v = self._keys_and_values(context, heads, new)
            attend(
                q[:, heads],
                k,
                v,
                sequences.query_start,
                sequences.context_start,
                sequences.max_q,
                sequences.max_ctx,
                self.scale,
                out=out[:, heads],
            )
        return out

    def _attend_new(self, heads: int) -> BoundPlan:
        """Attention over keys and values of so many heads."""
        mla, plans = self.mla, self.plans
        return plans.bind(
            "varlen_attention", heads=heads, kv_heads=heads, qk_dim=mla.qk_dim, v_dim=mla.v_dim, x=plans.x
        )

    def _keys_and_values(self, context: Tensor, heads: slice, new: bool) -> tuple[Tensor, Tensor]:
        """context [rows, latent_dim] -> k [rows, heads, qk_dim], v [rows, heads, v_dim] of some heads. With `new`, the rows are the tokens of this
        step and the heads are all heads: the plans of `kv` are prepared for so many rows.
        """
        mla, rows = self.mla, context.shape[0]
        latents = context[:, : mla.kv_lora_rank]
        k = context.new_empty(rows, heads.stop - heads.start, mla.qk_dim)
        k[..., mla.nope_dim :] = context[:, None, mla.kv_lora_rank :]
        if new:
            kv = self.kv(latents).view(rows, self.heads, mla.nope_dim + mla.v_dim)
            k[..., : mla.nope_dim] = kv[..., : mla.nope_dim]
            return k, kv[..., mla.nope_dim :]
        v = context.new_empty(rows, heads.stop - heads.start, mla.v_dim)
        self.to_latent.of_all(latents, heads, transposed=True, out=k[..., : mla.nope_dim])
        self.to_values.of_all(latents, heads, out=v)
        return k, v


LARGEST_EXPANDED = 1 << 20
"""Keys (tokens times heads) up to which those of all heads are materialized at a time: as many as 8,192 new tokens of 128 heads have."""
FEW_HEADS = 16
"""Heads at a time where there are more keys, if the number of heads is a multiple."""
LATENT_EPS = 1e-6
"""Epsilon of the norms of latents: a constant in the model's own code, independent of rms_norm_eps."""
