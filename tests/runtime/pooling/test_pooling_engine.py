"""The engine for pooling: how batches are chosen, limits on what waits, threads, failures."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.errors import UsageError
from gristmill.runtime.pooling.engine import PoolingEngine, PoolingInput
from gristmill.runtime.scheduler import QueueFull, RequestTooLarge
from gristmill.runtime.sequences import Sequences


class Sums:
    """A model whose hidden states are its tokens, and a head that sums them. `batches` has the lengths of each batch."""

    columns = 1
    by_token = False

    def __init__(self) -> None:
        self.plans = SimpleNamespace(device=torch.device("cpu"))
        self.batches: list[tuple[int, ...]] = []
        self.inside = 0

    def encode(self, batch: Sequences) -> Tensor:
        self.inside += 1
        assert self.inside == 1, "two batches at a time"
        self.batches.append(batch.lengths)
        if 13 in batch.tokens:
            self.inside -= 1
            raise ArithmeticError("13")
        self.inside -= 1
        return batch.tokens[:, None].float()

    def __call__(self, hidden: Tensor, batch: Sequences, skip: Any) -> Tensor:
        return torch.segment_reduce(hidden, "sum", lengths=torch.tensor(batch.lengths))


def made(**limits: Any) -> tuple[PoolingEngine, Sums]:
    model = Sums()
    given = {"max_batch_tokens": 10, "max_seqs": 4, "max_length": 40, **limits}
    return PoolingEngine(model, model, **given), model  # type: ignore[arg-type]


def inputs(*lengths: int) -> list[PoolingInput]:
    return [PoolingInput([1] * length) for length in lengths]


def test_batches_begin_with_the_oldest_and_have_like_lengths() -> None:
    engine, model = made()
    results = engine.run(inputs(3, 40, 1, 4, 3, 1, 9))
    assert [float(each) for each in results] == [3, 40, 1, 4, 3, 1, 9]
    assert model.batches == [(3, 3, 4), (40,), (1, 1), (9,)]
    assert engine.waiting == 0
    engine.run(inputs(1, 1, 1, 1, 1))
    assert model.batches[4:] == [(1, 1, 1, 1), (1,)]


def test_limits() -> None:
    engine, model = made(max_queued=3, max_queued_tokens=20)
    with pytest.raises(QueueFull, match="max_queued = 3"):
        engine.run(inputs(1, 1, 1, 1))
    with pytest.raises(QueueFull, match="max_queued_tokens = 20"):
        engine.run(inputs(10, 11))
    with pytest.raises(RequestTooLarge, match="41 tokens"):
        engine.run(inputs(1, 41))
    assert engine.waiting == 0 and not model.batches  # all or none
    engine.add(inputs(1, 1))
    engine.add(inputs(1))
    with pytest.raises(QueueFull):
        engine.add(inputs(1))
    engine.step()
    assert [float(each) for each in engine.run(inputs(10, 10))] == [10, 10]


def test_a_failure_is_that_of_its_batch() -> None:
    engine, _ = made()
    good, bad = engine.add(inputs(9))[0], engine.add([PoolingInput([13, 1])])[0]
    assert len(engine.step()) == 1 and len(engine.step()) == 1
    assert float(good.result()) == 9
    with pytest.raises(ArithmeticError):
        bad.result()
    with pytest.raises(ArithmeticError):
        engine.run([PoolingInput([13])])
    assert [float(each) for each in engine.run(inputs(2))] == [2]


def test_what_is_cancelled_is_not_computed() -> None:
    engine, model = made()
    first, second = engine.add(inputs(5, 5))
    assert first.cancel()
    assert len(engine.step()) == 1 and model.batches == [(5,)] and float(second.result()) == 5
    with pytest.raises(CancelledError):
        first.result()
    assert engine.step() == []


def test_what_is_cancelled_takes_no_room() -> None:
    """Neither in the queue nor in a batch: who waits behind callers that have left is next."""
    engine, model = made(max_queued=3, max_queued_tokens=25)
    for result in engine.add(inputs(9, 8, 8)):
        result.cancel()
    assert engine.waiting == 3
    kept = engine.add(inputs(2, 1))
    assert "2 waiting (3 tokens)" in engine.dump()
    late = engine.add(inputs(4))
    assert late[0].cancel() and len(engine.step()) == 2
    assert model.batches == [(2, 1)] and [float(each.result()) for each in kept] == [2, 1]
    assert "0 waiting (0 tokens)" in engine.dump()


def test_a_failing_run_leaves_nothing_behind() -> None:
    engine, model = made()
    with pytest.raises(ArithmeticError):
        engine.run([PoolingInput([13] * 10), *inputs(10, 10)])
    assert engine.step() == [] or len(model.batches) == 3


def test_many_threads() -> None:
    engine, model = made()
    start = threading.Barrier(8)

    def work(seed: int) -> bool:
        start.wait()
        lengths = [1 + (seed * i * i + i) % 12 for i in range(30)]
        return [float(each) for each in engine.run(inputs(*lengths))] == lengths

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert sum(map(len, model.batches)) == 8 * 30 and engine.waiting == 0


def test_controls() -> None:
    engine, model = made()
    engine.pause()
    (first,) = engine.add(inputs(2))
    assert engine.step() == [] and engine.paused and engine.has_unfinished()
    with pytest.raises(UsageError, match="paused"):
        engine.run(inputs(1))
    with pytest.raises(UsageError, match="unknown mode"):
        engine.pause("now")  # type: ignore[arg-type]
    engine.resume()
    assert len(engine.step()) == 1 and float(first.result()) == 2
    (second,) = engine.add(inputs(2))
    engine.drain(0.0)
    with pytest.raises(EngineDraining):
        engine.add(inputs(1))
    assert engine.step() == [] and second.cancelled() and not engine.has_unfinished()
    assert len(model.batches) == 1 and "0 waiting (0 tokens), draining" in engine.dump()
