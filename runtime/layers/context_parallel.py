"""Attention over a latent cache that is sharded over ranks (decode context parallelism).

Rank r of n has the r-th of n runs of `block_size` tokens in each block of the scheduler, which has n times as many tokens. Each rank attends with the
queries of all heads to the keys that it has, and partial results are merged by their log-sum-exps, each head by the rank that has it: Helix (Bhatia
et al., 2025, arXiv:2507.07120) and vLLM's decode context parallelism do the same. Keys that a rank has are in order, so those up to a position
are its first ones: each new token is a sequence of its own, with a length of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gristmill.runtime.batch import ContextShard
from gristmill.runtime.config import MlaConfig
from gristmill.runtime.layers.plans import Plans


class ContextParallelAttention:
    """Attention of `heads` query heads of this rank over the parts of the latent cache on all ranks. Sizes of `mla` are as in `LatentAttention`."""

    def __init__(self, plans: Plans, mla: MlaConfig, heads: int) -> None:
        self.plans, self.mla, self.heads = plans, mla, heads
        world = plans.mesh.world
        self.total = heads * world
        self.lse_items = torch.float32.itemsize // plans.dtype.itemsize
        self.gather = plans.bind("all_gather", n=heads * mla.latent_dim, x=plans.x, world=world)
        self.attend = plans.bind(
            "mla_attention",
            heads=self.total,
            latent_dim=mla.kv_lora_rank,
            rope_dim=mla.rope_dim,
            block_size=plans.block_size,
            x=plans.x,
            lse=True,
        )
        width = self.total * (mla.kv_lora_rank + self.lse_items)
        self.exchange = plans.bind("all_gather", n=width, x=plans.x, world=world)
        self.merge = plans.bind("merge_attention_states", h=heads, d=mla.kv_lora_rank, x=plans.x)

    def __call__(self, query: Tensor, cache: Tensor, shard: ContextShard, scale: float) -> Tensor:
        """query [tokens, heads, latent_dim], cache [blocks, block_size, latent_dim] -> [tokens, heads, kv_lora_rank]."""
        mesh, rank, tokens = self.plans.mesh, self.mla.kv_lora_rank, query.shape[0]
        queries = query.new_empty(tokens, self.total * self.mla.latent_dim)
        self.gather(query.flatten(1), mesh.group, mesh.world, queries)
        partial = query.new_empty(tokens, self.total, rank)
        lse = query.new_empty(tokens, self.total, dtype=torch.float32)
        self.attend(
            queries.view(tokens, self.total, -1),
            cache,
            shard.block_table,
            shard.query_start,
            shard.seq_lens,
            1,
            shard.max_ctx,
            scale,
            rank,
            lse,
            self.plans.workspace(self.attend, tokens),
            out=partial,
        )
        lse.masked_fill_(shard.empty[:, None], -math.inf)
        mine = torch.cat([partial.flatten(1), lse.view(query.dtype)], 1)
        width = mine.shape[1]
        of_ranks = mine.new_empty(tokens, mesh.world * width)
        self.exchange(mine, mesh.group, mesh.world, of_ranks)
        first = mesh.rank * self.heads
        out = out_lse = None
        for part in of_ranks.split(width, 1):
            values = part[:, : self.total * rank].view(tokens, self.total, rank)
            lses = part[:, self.total * rank :].contiguous().view(torch.float32)
            next_out = values[:, first : first + self.heads].contiguous()
            next_lse = lses[:, first : first + self.heads].contiguous()
            if out is None or out_lse is None:
                out, out_lse = next_out, next_lse
                continue
            merged, merged_lse = torch.empty_like(out), torch.empty_like(out_lse)
            self.merge(out, out_lse, next_out, next_lse, merged, merged_lse)
            out, out_lse = merged, merged_lse
        return query.new_empty(tokens, self.heads, rank) if out is None else out
