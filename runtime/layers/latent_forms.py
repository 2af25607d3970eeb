"""Which form of latent attention each sequence of a step takes, by the arithmetic of both, and what the forms read.

The choice depends on the lengths of the sequence only, not on the other requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, send_parts
from gristmill.runtime.config import MlaConfig
from gristmill.runtime.layers.gathered_context import SpreadSequences, spread
from gristmill.runtime.layers.some_sequences import Sequences, others, some, whole

EXPANDING = 2.0
"""Cost of a multiplication that makes keys and values of cached tokens, relative to one of attention: they are written and read again.
docs/performance/mla_prefill_hopper.md has the times of both forms."""


def expands(new: int, context: int, mla: MlaConfig) -> bool:
    """Whether the un-absorbed form takes less than the absorbed one for `new` tokens that are the last of `context`.

    It has fewer multiplications for each pair of query and key, and makes the keys and values of all tokens. Of the new ones that is as
    much as the absorbed form's projections of their queries and results, of cached ones it is more. A single token is absorbed, as it is
    in a captured step.
    """
    pairs = new * context - new * (new - 1) // 2
    saved = pairs * (2 * mla.kv_lora_rank + mla.rope_dim - mla.qk_dim - mla.v_dim)
    made = (context - new) * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
    return new > 1 and saved > EXPANDING * made


@dataclass(frozen=True)
class Expanded(Sequences):
    """The sequences in the un-absorbed form.

    Attributes:
        context_start: int32 [S + 1], where the context of each sequence begins in `slots`.
        slots: int64, where the latents of the contexts are in the cache; None = all of their tokens are new.
    """

    context_start: Tensor
    slots: Tensor | None


@dataclass(frozen=True)
class Forms:
    """The sequences of a batch in either form; None where there are none."""

    expanded: Expanded | None
    absorbed: Sequences | None


@dataclass(frozen=True)
class SpreadForms:
    """The sequences of a batch over a cache that is spread over ranks.

    Attributes:
        new: those in the un-absorbed form all of whose tokens are new; None where there are none.
        cached: those of each of `parts.gathered` in the un-absorbed form, whose slots are in the gathered blocks.
        parts: the contexts to gather, and the other sequences, which are absorbed.
    """

    new: Expanded | None
    cached: tuple[Expanded, ...]
    parts: SpreadSequences


def split(batch: Batch, mla: MlaConfig, block_size: int) -> Forms:
    """The forms of the sequences of a batch, from the lengths that the host knows; absorbed if it knows none."""
    chosen = [i for i, (new, context) in enumerate(batch.lengths) if expands(new, context, mla)]
    if not chosen:
        return Forms(None, whole(batch))
    rest = others(batch, chosen)
    return Forms(_expanded(batch, chosen, block_size), some(batch, rest) if rest else None)


def split_spread(batch: Batch, mla: MlaConfig, world: int, block_size: int) -> SpreadForms:
    """The forms of the sequences of a batch over a cache that is spread over ranks, from the lengths that the host knows."""
    chosen = [i for i, (new, context) in enumerate(batch.lengths) if expands(new, context, mla)]
    new = [i for i in chosen if batch.lengths[i][0] == batch.lengths[i][1]]
    cached = [i for i in chosen if batch.lengths[i][0] < batch.lengths[i][1]]
    parts = spread(batch, cached, others(batch, chosen), world, block_size)
    return SpreadForms(
        _expanded(batch, new, block_size) if new else None,
        tuple(_over_context(part.sequences, part.contexts, block_size) for part in parts.gathered),
        parts,
    )


def _expanded(batch: Batch, indices: Sequence[int], block_size: int) -> Expanded:
    chosen = some(batch, indices)
    contexts = [batch.lengths[i][1] for i in indices]
    if all(batch.lengths[i][0] == batch.lengths[i][1] for i in indices):
        return Expanded(**vars(chosen), context_start=chosen.query_start, slots=None)
    return _over_context(chosen, contexts, block_size)


def _over_context(chosen: Sequences, contexts: Sequence[int], block_size: int) -> Expanded:
    """Sequences with contexts of these lengths in a cache."""
    device, total = chosen.query_start.device, sum(contexts)
    (context_start,) = send_parts(([0, *accumulate(contexts)],), torch.int32, device)
    sequence = torch.arange(len(contexts), device=device).repeat_interleave(
        context_start.diff(), output_size=total
    )
    position = torch.arange(total, device=device) - context_start[sequence]
    block = chosen.block_table[sequence, position // block_size].long()
    slots = block * block_size + position % block_size
    return Expanded(**vars(chosen), context_start=context_start, slots=slots)
