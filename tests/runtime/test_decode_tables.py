"""Block tables of decode steps: those of long contexts are not copied again in every step, and are what a whole copy would be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.runtime import decode_inputs
from gristmill.runtime.decode_inputs import Buffers, DecodeInputs, RowState
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.steps_in_flight import SampledTokens

ROWS, WIDTH, BLOCK = 6, 12, 4
ROW = SamplingRow(SamplingParams(), 0, 0)


def entry(row: int, blocks: list[int]) -> ScheduledRequest:
    return ScheduledRequest(str(row), BLOCK * len(blocks) - 1, 1, True, None, blocks, (), 0, row)


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Also makes contexts of two blocks long. The rows of each whole copy."""
    taken: list[int] = []
    take = np.take

    def counted(table: Any, places: Sequence[int], **named: Any) -> Any:
        taken.append(len(places))
        return take(table, places, **named)

    monkeypatch.setattr(decode_inputs, "LONG", 2)
    monkeypatch.setattr(np, "take", counted)
    return taken


@pytest.mark.parametrize("seed", range(20))
def test_tables_are_those_of_the_requests(seed: int, takes: list[int]) -> None:
    """Requests come, grow, leave and change places; graphs of two sizes share the memory of two steps in flight."""
    dice = random.Random(seed)
    memory = DecodeInputs(ROWS, WIDTH, SampledTokens(ROWS, torch.device("cpu")))
    state = RowState(ROWS, WIDTH, 100)
    sizes = [Buffers(ROWS, WIDTH, memory), Buffers(ROWS, WIDTH // 2, memory), Buffers(3, WIDTH, memory)]
    running: dict[int, list[int]] = {}
    for number in range(200):
        for row in range(ROWS):
            if row not in running and dice.random() < 0.1:
                running[row] = [dice.randrange(90) for _ in range(dice.randrange(1, 4))]
            elif row in running and dice.random() < 0.05:
                del running[row]
            elif row in running and len(running[row]) < WIDTH and dice.random() < 0.3:
                running[row].append(dice.randrange(90))
        order = list(running)
        if dice.random() < 0.1:
            dice.shuffle(order)
            running = {row: running[row] for row in order}
        longest = max(map(len, running.values()), default=0)
        fits = [b for b in sizes if b.seqs >= len(order) and b.width >= longest]
        if not order or not fits:
            continue
        buffers = fits[0] if dice.random() < 0.8 else dice.choice(fits)
        entries = [entry(row, running[row]) for row in order]
        buffers.fill(number % 2, entries, [ROW] * len(entries), state, BLOCK)
        (table,) = buffers.host[number % 2]["table"]
        for place, row in enumerate(order):
            assert table[place, : len(running[row])].tolist() == running[row]
        assert not table[len(order) :].any()
    assert takes


def test_a_step_copies_new_blocks_only(takes: list[int]) -> None:
    memory = DecodeInputs(ROWS, WIDTH, SampledTokens(ROWS, torch.device("cpu")))
    state, buffers = RowState(ROWS, WIDTH, 100), Buffers(ROWS, WIDTH, memory)
    running = [[5, 6], [7]]

    def fill(number: int) -> None:
        entries = [entry(row, blocks) for row, blocks in enumerate(running)]
        buffers.fill(number % 2, entries, [ROW] * 2, state, BLOCK)

    for number in range(8):
        running[number % 2].append(10 + number)
        fill(number)
    assert takes == [2, 2], "the first step in each place"
    running[0] = [1, 2, 3]
    fill(8)
    assert takes == [2, 2, 2] and buffers.host[0]["table"][0, 0, :3].tolist() == [1, 2, 3]
