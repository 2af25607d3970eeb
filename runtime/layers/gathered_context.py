"""Prompts over a cache whose contexts are sharded over ranks by tokens: each rank gets the contexts from all ranks, for its own heads.

With the queries exchanged (`layers.context_parallel`) a token is a sequence of its own, so each token of a prompt would read its context again.
Here the blocks of a context are exchanged instead, once for all new tokens of its sequence, and the ranks compute as with tensor parallelism alone.
What a rank has of a block of the scheduler is one run of its tokens, and the runs of all ranks one after another are the block: what arrives is
a cache in the order of positions, which the same kernels read. It lives as long as the attention of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.batch import Batch, ContextShard, send_parts
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.some_sequences import Sequences, some
from gristmill.runtime.parallel.mesh import Mesh

FEWEST_GATHERED = 8
"""New tokens of a sequence from which on its context is gathered. Fewer read the parts of the context where they are in about the time that the
context takes from one GPU to another, which has a tenth of the bandwidth of memory."""
MOST_GATHERED = 1 << 18
"""Tokens of contexts that are gathered at a time, or those of one sequence, which bounds the memory of their copy."""
MOST_BLOCKS = 512
"""Blocks that are exchanged in one call, so that few sizes of calls are prepared: some 8 MiB of each rank."""


KeysAndValues = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys and values of this rank, and the scales of codes."""


@dataclass(frozen=True)
class GatheredContexts:
    """Sequences of a step whose contexts are gathered.

    Attributes:
        sequences: their `block_table` is that of the gathered blocks, each of a run of `block_size` tokens.
        blocks: int64 [B], the scheduler's blocks of one context after another.
        contexts: tokens of each context.
    """

    sequences: Sequences
    blocks: Tensor
    contexts: tuple[int, ...]


@dataclass(frozen=True)
class SpreadSequences:
    """The sequences of a step over a spread cache.

    Attributes:
        gathered: those whose contexts are gathered, as many at a time as memory allows.
        rows: the tokens of all others; None = there are none.
        shard: the context shard of these tokens.
    """

    gathered: tuple[GatheredContexts, ...]
    rows: slice | Tensor | None
    shard: ContextShard | None


def spread(
    batch: Batch, gathered: Sequence[int], others: Sequence[int], world: int, block_size: int
) -> SpreadSequences:
    """The sequences with these indices, of a batch of which the host knows the lengths."""
    groups: list[list[int]] = []
    size = 0
    for index in gathered:
        context = batch.lengths[index][1]
        if not groups or size + context > MOST_GATHERED:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += context
    made = tuple(_gathered(batch, group, world, block_size) for group in groups)
    if not others or batch.context_shard is None:
        return SpreadSequences(made, None, None)
    rows = some(batch, others).rows
    return SpreadSequences(made, rows, _shard_of(batch.context_shard, rows))


def _gathered(batch: Batch, indices: Sequence[int], world: int, block_size: int) -> GatheredContexts:
    chosen = some(batch, indices)
    counts = [cdiv(batch.lengths[i][1], world * block_size) for i in indices]
    device, total = batch.block_table.device, sum(counts)
    (first,) = send_parts(([0, *accumulate(counts)],), torch.int32, device)
    sequence = torch.arange(len(indices), device=device).repeat_interleave(first.diff(), output_size=total)
    place = torch.arange(total, device=device) - first[sequence]
    runs = torch.arange(max(counts) * world, dtype=torch.int32, device=device)
    # Places behind a context are those of the next one, or behind the last one: no query reads them.
    table = (first[:-1, None] * world + runs).clamp(max=total * world - 1)
    return GatheredContexts(
        replace(chosen, block_table=table),
        chosen.block_table[sequence, place].to(torch.int64),
        tuple(batch.lengths[i][1] for i in indices),
    )


def _shard_of(shard: ContextShard, rows: slice | Tensor) -> ContextShard:
    lengths = shard.seq_lens[rows]
    start = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    return ContextShard(shard.block_table[rows], start, lengths, shard.max_ctx, shard.empty[rows])


def _exchange(plan: BoundPlan, mesh: Mesh, sent: Tensor, received: Tensor) -> None:
    """The collective operation of a plan, for a row per block: `MOST_BLOCKS` of them at a time."""
    for first in range(0, len(sent), MOST_BLOCKS):
        piece = slice(first, first + MOST_BLOCKS)
        plan(sent[piece], mesh.group, mesh.world, received[piece])


class HeadsOfRank:
    """Gathers blocks of a cache with heads: each rank gets those of its own ones, from all ranks.

    Attributes:
        heads: KV heads of a rank.
        own: which of all KV heads they are.
    """

    def __init__(self, plans: Plans, kv_heads: int, head_dim: int) -> None:
        mesh = plans.mesh
        self.plans, self.heads = plans, max(1, kv_heads // mesh.world)
        first = [rank * kv_heads // mesh.world for rank in range(mesh.world)]
        self.own = slice(first[mesh.rank], first[mesh.rank] + self.heads)
        # Where several ranks have the same KV head, it is sent to each of them.
        self._repeated = None if kv_heads >= mesh.world else torch.tensor(first, device=plans.device)
        form = plans.cache_format
        items = plans.block_size * self.heads
        # Codes are sent as numbers of the activations' dtype, so many at a time.
        numbers = items * head_dim // (plans.dtype.itemsize if form.quantized else 1)
        self._values = self._bind(numbers, plans.x)
        self._scales = self._bind(items, "fp32") if form.token_scales else None

    @staticmethod
    def serves(plans: Plans, heads: int, kv_heads: int, head_dim: int) -> bool:
        """Whether contexts are gathered: not where results must not depend on how a prompt is divided, nor where the heads of a rank have no
        KV heads for themselves.

        Args:
            heads: those of a rank.
        """
        world = plans.mesh.world
        row = plans.block_size * max(1, kv_heads // world) * head_dim
        fits = kv_heads % world == 0 or (world % kv_heads == 0 and heads * world % kv_heads == 0)
        whole = not plans.cache_format.quantized or row % plans.dtype.itemsize == 0
        return fits and whole and not plans.policy.batch_invariant

    def __call__(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """cache [blocks, block_size, kv_heads, ...] of this rank, blocks int64 [B] -> [B * world, block_size, heads, ...]."""
        mesh, count, plan = self.plans.mesh, len(blocks), self._values
        picked = cache[blocks]
        if self._repeated is not None:
            picked = picked[:, :, self._repeated]
        sent = picked.unflatten(2, (mesh.world, self.heads)).transpose(1, 2).contiguous()
        numbers = sent.view(count, mesh.world, -1)
        if self._scales is not None and cache.dim() == 3:
            plan = self._scales
        else:
            numbers = numbers.view(self.plans.dtype)
        received = torch.empty_like(numbers)
        _exchange(plan, mesh, numbers, received)
        return received.view(sent.dtype).view(count * mesh.world, *sent.shape[2:])

    def of_context(self, cache: KeysAndValues, blocks: Tensor) -> KeysAndValues:
        """Keys, values and scales: of these blocks, from all ranks, for the heads of this one."""
        keys, values, k_scale, v_scale = cache
        return (
            self(keys, blocks),
            self(values, blocks),
            self._own_scale(k_scale, blocks),
            self._own_scale(v_scale, blocks),
        )

    def _own_scale(self, scale: Tensor | None, blocks: Tensor) -> Tensor | None:
        if scale is None or self._scales is not None:
            return None if scale is None else self(scale, blocks)
        return scale if scale.shape[-1] == 1 else scale[..., self.own].contiguous()  # per tensor; per head

    def _bind(self, n: int, x: str) -> BoundPlan:
        return self.plans.bind("all_to_all", n=n, x=x, world=self.plans.mesh.world)


class LatentsOfAll:
    """Gathers blocks of a cache of latents, which all heads share."""

    def __init__(self, plans: Plans, latent_dim: int) -> None:
        self.plans, self.n = plans, plans.block_size * latent_dim
        self.plan = plans.bind("all_gather", n=self.n, x=plans.x, world=plans.mesh.world)

    def __call__(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """cache [blocks, block_size, latent_dim] of this rank, blocks int64 [B] -> [B * world, block_size, latent_dim]."""
        mesh, count = self.plans.mesh, len(blocks)
        sent = cache[blocks].reshape(count, self.n)
        received = sent.new_empty(count, mesh.world * self.n)
        _exchange(self.plan, mesh, sent, received)
        return received.view(count * mesh.world, *cache.shape[1:])
