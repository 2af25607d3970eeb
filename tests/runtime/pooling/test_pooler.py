"""Pooling against sums written out sequence by sequence in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gristmill.runtime.layers.pool import pool
from gristmill.runtime.pooling.modules import MODES
from gristmill.runtime.sequences import Sequences

LENGTHS = (7, 1, 257, 3, 64)


def by_hand(hidden: Tensor, lengths: tuple[int, ...], mode: str, skip: tuple[int, ...]) -> Tensor:
    """float64 [sequences, H]."""
    pairs = zip(hidden.double().split([*lengths]), skip, strict=True)
    return torch.stack([_one(states, mode, first) for states, first in pairs])


def _one(states: Tensor, mode: str, first: int) -> Tensor:
    kept, weights = states[first:], torch.arange(1, len(states) + 1).double()[first:, None]
    if mode in ("cls", "last"):
        return states[0 if mode == "cls" else -1]
    if mode == "max":
        return kept.amax(0)
    if mode == "weighted_mean":
        return (kept * weights).sum(0) / weights.sum()
    return kept.sum(0) / (len(kept) if mode == "mean" else len(kept) ** 0.5)


@pytest.mark.parametrize("skip", [(0,) * 5, (2, 0, 100, 2, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, skip: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batch = Sequences.of([[0] * length for length in LENGTHS])
    for hidden in (
        torch.randn(sum(LENGTHS), 33),
        torch.randn(sum(LENGTHS), 66)[:, ::2],
        -torch.rand(sum(LENGTHS), 8) - 1,
    ):
        expected = by_hand(hidden, LENGTHS, mode, skip)
        assert float((pool(hidden, batch, [mode], skip) - expected).abs().max()) < 1e-5
    half = torch.randn(sum(LENGTHS), 16).bfloat16()
    result = pool(half, batch, [mode], skip)
    assert result.dtype == torch.float32
    assert (
        float((result - by_hand(half, LENGTHS, mode, skip)).abs().max()) < 1e-5
    )  # not rounded to half precision


def test_several_modes_are_joined() -> None:
    batch, hidden = Sequences.of([[1, 2], [3]]), torch.randn(3, 4)
    both = pool(hidden, batch, ["cls", "mean"])
    assert torch.equal(both[:, :4], pool(hidden, batch, ["cls"]))
    assert torch.equal(both[:, 4:], pool(hidden, batch, ["mean"]))


def test_a_text_that_is_all_prompt() -> None:
    """Nothing is left to pool: zeros, and no NaN."""
    batch, hidden = Sequences.of([[1, 2], [3]]), torch.randn(3, 4)
    for mode in ("mean", "weighted_mean", "mean_sqrt_len"):
        assert torch.equal(pool(hidden, batch, [mode], [2, 0])[0], torch.zeros(4))


def test_sequences() -> None:
    batch = Sequences.of([[5, 6, 7], [8]], types=[[0, 1, 1], None])
    assert batch.tokens.tolist() == [5, 6, 7, 8] and batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.types is not None and batch.types.tolist() == [0, 1, 1, 0]
    assert batch.starts.tolist() == [0, 3, 4] and batch.starts.dtype == torch.int32
    assert batch.first.tolist() == [0, 3] and batch.last.tolist() == [2, 3] and batch.longest == 3
    assert Sequences.of([[1], [2]]).types is None
