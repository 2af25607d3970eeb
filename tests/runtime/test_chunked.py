"""Attention within chunks: parts of a step as sequences, equal for steps whose lengths the host knows and for those of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from gristmill.runtime.batch import Batch, make_batch
from gristmill.runtime.layers.chunked import Chunks, chunked
from gristmill.runtime.scheduler import ScheduledRequest

SIZE, BLOCK = 8, 4


def step(*spans: tuple[int, int]) -> Batch:
    """A step with the positions [start, end) of each sequence; block i of sequence s is 100 s + i."""
    entries = [
        ScheduledRequest(
            id=str(s),
            tokens=[1] * (end - start),
            start=start,
            count=end - start,
            block_ids=[100 * s + i for i in range(-(-end // BLOCK))],
            samples=True,
            new_blocks=[],
        )
        for s, (start, end) in enumerate(spans)
    ]
    return make_batch(entries, BLOCK, torch.device("cpu"))


def seen(part: Batch | Chunks) -> list[list[int]]:
    """The places in the cache (block * BLOCK + offset) that each token of a step sees."""
    result = []
    for row, (start, end) in enumerate(
        zip(part.query_start.tolist(), part.query_start.tolist()[1:], strict=False)
    ):
        length = int(part.seq_lens[row])
        assert length <= part.max_ctx and end - start <= part.max_q
        places = [int(part.block_table[row, i // BLOCK]) * BLOCK + i % BLOCK for i in range(length)]
        result += [places[: length - (end - start) + 1 + i] for i in range(end - start)]
    return result


def test_every_token_sees_its_chunk() -> None:
    spans = ((0, 3), (0, 8), (5, 23), (16, 17), (31, 32), (7, 9))
    batch = step(*spans)
    expected = [
        [(100 * s + p // BLOCK) * BLOCK + p % BLOCK for p in range(q - q % SIZE, q + 1)]
        for s, (start, end) in enumerate(spans)
        for q in range(start, end)
    ]
    known = chunked(batch, SIZE, BLOCK)
    assert seen(known) == expected and len(known.seq_lens) == 6 + 2 + 1  # boundaries: 8 and 16, and 8
    captured = chunked(replace(batch, lengths=()), SIZE, BLOCK)
    assert seen(captured) == expected and captured.max_q == 1


def test_a_step_in_first_chunks_stays_as_it_is() -> None:
    batch = step((0, 8), (3, 5))
    assert chunked(batch, SIZE, BLOCK) is batch
