"""Planted faults that the comparisons with transformers in other tests must detect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gristmill.kernels.rope.cache import RopeParameters
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime import runner
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.mla import LatentAttention
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.llm import LLM
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, NAMES, Answer, Comparison
from tests.runtime.test_greedy import compare
from tests.runtime.test_logits import LIMIT


def largest_error(llm: LLM, name: str) -> float:
    ids = oracle.window(0)[:128]
    return float((window_logits(llm.engine, ids) - oracle.logits(oracle.oracle(name), ids)).abs().max())


def changed_batch(monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch], dict[str, object]]) -> None:
    """Changes the batch of every step before the layers see it."""
    make_batch = runner.make_batch

    def changed(*args: object, **options: object) -> Batch:
        batch = make_batch(*args, **options)  # type: ignore[arg-type]
        return dataclasses.replace(batch, **change(batch))  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "make_batch", changed)


def differs(llm: LLM, name: str, prompts: list[list[int]]) -> None:
    """Asserts that the comparison of greedy ids fails."""
    with pytest.raises(AssertionError):
        compare("planted fault", llm, name, prompts)


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_off_by_one(
    name: str, make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's KV is written one slot late: greedy ids differ where the oracle is certain."""
    changed_batch(monkeypatch, lambda batch: {"slots": batch.slots + 1})
    differs(make_plain(name), name, oracle.prompts()[14:15])


@pytest.mark.parametrize("name", NAMES)
def test_swapped_block_tables(
    name: str, make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests read each other's cache, which only a batch of several shows."""
    changed_batch(monkeypatch, lambda batch: {"block_table": batch.block_table.flip(0)})
    compare("alone", make_plain(name), name, oracle.prompts()[8:9])
    differs(make_plain(name), name, oracle.prompts()[8:10])


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_begin_anew_in_each_chunk(
    name: str, make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def anew(batch: Batch) -> dict[str, object]:
        starts = batch.query_start[:-1].repeat_interleave(batch.query_start.diff())
        return {"positions": torch.arange(len(batch.tokens)) - starts} if batch.max_q > 1 else {}

    changed_batch(monkeypatch, anew)
    compare("whole", make_plain(name), name, oracle.prompts()[14:15])
    differs(make_plain(name, max_chunk=7), name, oracle.prompts()[14:15])


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_cache_that_believes_hashes(name: str, make_plain: Callable[..., LLM]) -> None:
    """Every block has the same hash and hits are not compared: the prefix of another prompt is served."""
    llm = make_plain(name)
    cache = llm.engine.scheduler.cache
    cache._hash = lambda content: 7
    compare("collisions are compared", llm, name, oracle.prompts()[13:15])
    cache.match = lambda hashes, tokens, *others: list(cache._table.values())[: (len(tokens) - 1) // 16]
    differs(llm, name, oracle.prompts()[14:15])


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_another_block_size(
    name: str, make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots for blocks of 64 are computed as if blocks had 16."""
    changed_batch(monkeypatch, lambda batch: {"slots": batch.slots // 64 * 16 + batch.slots % 64})
    differs(make_plain(name, block_size=64, num_blocks=64), name, oracle.prompts()[14:15])


@pytest.mark.parametrize(
    ("name", "target"), [(LLAMA, "layers.2.gate_up"), (DEEPSEEK, "layers.1.experts.gate_up")]
)
def test_swapped_shards(
    name: str, target: str, make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Weights._take

    def swapped(self: Weights, tensor_name: str) -> object:
        weight = take(self, tensor_name)
        return dataclasses.replace(weight, sources=weight.sources[::-1]) if tensor_name == target else weight

    monkeypatch.setattr(Weights, "_take", swapped)
    assert largest_error(make_plain(name), name) > 10 * LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_the_other_rope_style(
    name: str, make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Rope.__init__

    def other(self: Rope, plans: Plans, config: ModelConfig, parameters: RopeParameters | None) -> None:
        changed = dataclasses.replace(config, rope_interleaved=not config.rope_interleaved)
        build(self, plans, changed, parameters)

    monkeypatch.setattr(Rope, "__init__", other)
    assert largest_error(make_plain(name), name) > 10 * LIMIT


def test_a_forgotten_correction_bias(make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    build = MixtureOfExperts.__init__

    def without(self: MixtureOfExperts, *args: object, **options: object) -> None:
        build(self, *args, **options)  # type: ignore[arg-type]
        self.bias = torch.zeros_like(self.bias)

    monkeypatch.setattr(MixtureOfExperts, "__init__", without)
    assert largest_error(make_plain(DEEPSEEK), DEEPSEEK) > 10 * LIMIT


def test_a_wrong_softmax_scale(make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    build = LatentAttention.__init__

    def misscaled(self: LatentAttention, *args: object, **options: object) -> None:
        build(self, *args, **options)  # type: ignore[arg-type]
        self.scale *= 1.01

    monkeypatch.setattr(LatentAttention, "__init__", misscaled)
    assert largest_error(make_plain(DEEPSEEK), DEEPSEEK) > 5 * LIMIT


def test_the_rule_of_comparison() -> None:
    sure = Answer((1,), (5, 6, 7), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    with pytest.raises(AssertionError, match="position 1: 9, oracle 6"):
        Comparison("x").add([5, 9, 7], sure)
    with pytest.raises(AssertionError, match="2 ids, oracle 3"):
        Comparison("x").add([5, 6], sure)
    undecided = dataclasses.replace(sure, logit_gaps=(1.0, 5e-5, 1.0))
    excused = Comparison("x")
    excused.add([5, 9, 1], undecided)
    with pytest.raises(AssertionError, match="1 excuses in 2 positions"):
        excused.finish()
