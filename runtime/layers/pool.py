"""Pooling: from the hidden states of sequences to one vector each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.runtime.sequences import Sequences


def pool(hidden: Tensor, batch: Sequences, modes: Sequence[str], skip: Sequence[int] | None = None) -> Tensor:
    """One vector for each sequence.

    Args:
        hidden: [tokens, H].
        modes: ``cls`` (the first token), ``max``, ``mean``, ``mean_sqrt_len`` (the sum over the root of the length), ``weighted_mean`` (weights
            are positions, from 1 on; Muennighoff, 2022, arXiv:2202.08904), ``last``; their vectors are joined.
        skip: first tokens of each sequence that are left out, but by ``cls`` and ``last``; None = none. Where none is left, the sum is 0.

    Returns:
        float32 [sequences, H · modes]; sums are in float64.
    """
    parts = [_pooled(hidden, batch, mode, skip) for mode in modes]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _pooled(hidden: Tensor, batch: Sequences, mode: str, skip: Sequence[int] | None) -> Tensor:
    if mode == "cls":
        return hidden[batch.first].float()
    if mode == "last":
        return hidden[batch.last].float()
    # Sums of thousands of tokens are added one by one, which costs float32 digits.
    rows, weights, lengths = hidden.double(), batch.positions.double() + 1, torch.tensor(batch.lengths)
    if skip is not None and any(skip):
        skipped = torch.tensor(skip).minimum(lengths)
        kept = batch.positions >= skipped.to(hidden.device).repeat_interleave(lengths.to(hidden.device))
        rows, weights, lengths = rows[kept], weights[kept], lengths - skipped
    counts = lengths.to(hidden.device)
    if mode == "max":
        return torch.segment_reduce(rows, "max", lengths=counts, unsafe=True).float()
    if mode == "weighted_mean":
        rows = rows * weights[:, None]
        divisor = torch.segment_reduce(weights, "sum", lengths=counts, unsafe=True, initial=0)
    else:
        divisor = counts.double()
    total = torch.segment_reduce(rows, "sum", lengths=counts, unsafe=True, initial=0)
    if mode == "mean_sqrt_len":
        divisor = divisor.sqrt()
    return (total / divisor.clamp(min=1e-9)[:, None]).float()
