"""Attention over a cache whose contexts are sharded over ranks by tokens (decode context parallelism).

Rank r of n has the r-th of n runs of `block_size` tokens in each block of the scheduler, which has n times as many tokens. Each rank attends with the
queries of all heads to the keys that it has, and partial results are merged by their log-sum-exps, each head by the rank that has it: Helix (Bhatia
et al., 2025, arXiv:2507.07120) and vLLM's decode context parallelism do the same. Keys that a rank has are in order, so those up to a position
are its first ones: each new token is a sequence of its own, with a length of its own. Prompts are computed otherwise (`layers.gathered_context`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.runtime.batch import ContextShard
from gristmill.runtime.layers.plans import Plans


class ContextParallelAttention:
    """Attention of `heads` query heads of this rank over the parts of a cache on all ranks.

    Args:
        query_dim, value_dim: elements of a head's query, and of its result.
    """

    def __init__(self, plans: Plans, heads: int, query_dim: int, value_dim: int) -> None:
        self.plans, self.heads, self.value_dim = plans, heads, value_dim
        world = plans.mesh.world
        self.total = heads * world
        self.gather = plans.bind("all_gather", n=heads * query_dim, x=plans.x, world=world)
        self.exchange = plans.bind("all_to_all", n=heads * value_dim, x=plans.x, world=world)
        self.exchange_lse = plans.bind("all_to_all", n=heads, x="fp32", world=world)
        self.merge = plans.bind("merge_attention_states", h=heads, d=value_dim, x=plans.x)

    def __call__(
        self, query: Tensor, shard: ContextShard, attend: Callable[[Tensor, Tensor, Tensor], None]
    ) -> Tensor:
        """query [tokens, heads, query_dim] -> [tokens, heads, value_dim].

        attend(queries, out, lse) writes the attention of the queries of all heads to the keys of this rank: queries [tokens, all heads,
        query_dim], out [tokens, all heads, value_dim], lse float32 [tokens, all heads].
        """
        mesh, tokens, world = self.plans.mesh, query.shape[0], self.plans.mesh.world
        queries = query.new_empty(tokens, self.total * query.shape[2])
        self.gather(query.flatten(1), mesh.group, world, queries)
        partial = query.new_empty(tokens, self.total, self.value_dim)
        lse = query.new_empty(tokens, self.total, dtype=torch.float32)
        attend(queries.view(tokens, self.total, -1), partial, lse)
        lse.masked_fill_(shard.empty[:, None], -math.inf)
        sent = (partial.view(tokens, world, -1), lse.view(tokens, world, -1))
        received = tuple(map(torch.empty_like, sent))
        self.exchange(sent[0], mesh.group, world, received[0])
        self.exchange_lse(sent[1], mesh.group, world, received[1])
        parts, lses = (of_ranks.transpose(0, 1).contiguous() for of_ranks in received)
        out, out_lse = parts[0].view(tokens, self.heads, -1), lses[0]
        for part, part_lse in zip(parts[1:], lses[1:], strict=True):
            merged, merged_lse = torch.empty_like(out), torch.empty_like(out_lse)
            self.merge(out, out_lse, part.view_as(out), part_lse, merged, merged_lse)
            out, out_lse = merged, merged_lse
        return out
