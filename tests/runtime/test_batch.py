"""Inputs of a step begin at multiples of 16 bytes, whatever its size: Triton compiles a kernel anew for other addresses."""

from __future__ import annotations

import pytest
import torch

from gristmill.runtime.batch import ALIGNMENT, make_batch, make_feedback, send_parts
from gristmill.runtime.decode_inputs import Buffers, DecodeInputs
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.steps_in_flight import SampledTokens

CPU = torch.device("cpu")


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_parts_of_a_copy(dtype: torch.dtype) -> None:
    parts = [[1], [2, 3, 4], [], [5] * 17, [6]]
    sent = send_parts(parts, dtype, CPU)
    assert [tensor.tolist() for tensor in sent] == parts
    assert all(map(is_aligned, sent)) and all(tensor.dtype is dtype for tensor in sent)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_batch_of_any_size(count: int) -> None:
    entries = [
        ScheduledRequest(f"{i}", 16 * i, 1 + i, True, [7] * (1 + i), list(range(i + 2)), [], 0, i)
        for i in range(count)
    ]
    batch, feedback = make_batch(entries, 16, CPU), make_feedback(entries, CPU)
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert feedback is not None and len(tensors) == 7
    assert all(map(is_aligned, [*tensors, feedback.places, feedback.read_rows, feedback.write_rows]))
    assert batch.query_start.tolist() == [i * (i + 1) // 2 for i in range(count + 1)]
    assert batch.block_table[-1].tolist() == list(range(count + 1))


@pytest.mark.parametrize(("seqs", "width", "per_seq"), [(1, 1, 1), (2, 3, 1), (1, 5, 3), (4, 7, 1)])
def test_inputs_of_decode_graphs(seqs: int, width: int, per_seq: int) -> None:
    memory = DecodeInputs(16, 8, SampledTokens(16, CPU))
    buffers = Buffers(seqs, width, memory, per_seq)
    assert all(map(is_aligned, buffers.parts.values()))
    spans = sorted((part.data_ptr(), part.nbytes) for part in buffers.parts.values())
    assert all(
        start + size <= following for (start, size), (following, _) in zip(spans, spans[1:], strict=False)
    )
