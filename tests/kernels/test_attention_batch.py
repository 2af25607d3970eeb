"""AttentionBatch: what it says is what the lengths and tables mean, at addresses that stay."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernels.attention.batch import AttentionBuffers, attention_batch


def test_a_step() -> None:
    b = attention_batch([1, 3, 0], [9, 5, 2], [[7, 2, 0], [4, 1], [3]], 4)
    assert b.query_start.tolist() == [0, 1, 4, 4] and b.seq_lens.tolist() == [9, 5, 2]
    assert b.slot_mapping.tolist() == [0 * 4 + 0, 4 * 4 + 2, 4 * 4 + 3, 1 * 4 + 0]
    assert b.block_table[0].tolist() == [7, 2, 0] and b.block_table[1, :2].tolist() == [4, 1]
    assert (b.tokens, b.seqs, b.max_q, b.max_ctx, b.total_ctx) == (4, 3, 3, 9, 16)
    assert b.query_start.dtype == b.seq_lens.dtype == b.block_table.dtype == torch.int32 and b.slot_mapping.dtype == torch.int64


def test_addresses_stay_and_bounds_may_be_stated() -> None:
    buffers = AttentionBuffers(8, 2, 4)
    one = buffers.fill([1, 1], [5, 3], [[1, 0], [2]], 4, max_ctx=16)
    two = buffers.fill([1, 1], [6, 9], [[1, 0], [2, 3, 5]], 4, max_ctx=16)
    for name in ("query_start", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(one, name).data_ptr() == getattr(two, name).data_ptr()
    assert one.max_ctx == two.max_ctx == 16 and one.seq_lens.tolist() == [6, 9]
    assert two.slot_mapping.tolist() == [0 * 4 + 1, 5 * 4 + 0]


@pytest.mark.parametrize(
    ("queries", "contexts", "tables", "message"),
    [
        ([1], [1, 2], [[0]], "1 query lengths, 2 contexts"),
        ([], [], [], "one at least"),
        ([9], [9], [[0, 1, 2]], "9 tokens in 1 sequences do not fit"),
        ([2], [1], [[0]], "sequence 0 has 2 new tokens in a context of 1"),
        ([1], [5], [[0]], "sequence 0 has 1 blocks of 4 for a context of 5"),
        ([1], [5], [[0, 1, 2, 3, 4]], "buffers hold 4 blocks"),
    ],
)
def test_refusals(queries: list[int], contexts: list[int], tables: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBuffers(8, 2, 4).fill(queries, contexts, tables, 4)


def test_bounds_under_the_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="max_q 1 or max_ctx 9 is under this step's 2 and 9"):
        AttentionBuffers(8, 2, 4).fill([2], [9], [[0, 1, 2]], 4, max_q=1)
