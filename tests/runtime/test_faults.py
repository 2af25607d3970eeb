"""Planted faults: each must be caught by the comparison with transformers that the other tests make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gristmill.runtime import runner
from gristmill.runtime.evaluate import window_logits
from gristmill.runtime.layers.mla import LatentAttention
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.weights import Weights
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, NAMES, Answer, Comparison, answer
from tests.runtime.test_greedy import PARAMS
from tests.runtime.test_logits import LIMIT


def worst(llm: LLM, name: str) -> float:
    ids = oracle.window(0)[:128]
    return float((window_logits(llm.engine, ids) - oracle.logits(oracle.oracle(name), ids)).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_off_by_one(name: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's KV lands one slot late: greedy ids differ while the oracle is sure."""
    make_batch = runner.make_batch

    def shifted(*args: object, **options: object) -> object:
        batch = make_batch(*args, **options)  # type: ignore[arg-type]
        return dataclasses.replace(batch, slots=batch.slots + 1)

    monkeypatch.setattr(runner, "make_batch", shifted)
    prompt = tuple(oracle.prompts()[14])
    result = make(name).generate([list(prompt)], PARAMS)[0]
    with pytest.raises(AssertionError):
        Comparison("slot off by one").add(result.token_ids, answer(name, prompt))


@pytest.mark.parametrize(("name", "target"), [(LLAMA, "layers.2.gate_up"), (DEEPSEEK, "layers.1.experts.gate_up")])
def test_swapped_shards(name: str, target: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    take = Weights._take

    def swapped(self: Weights, wanted: str) -> object:
        weight = take(self, wanted)
        return dataclasses.replace(weight, sources=weight.sources[::-1]) if wanted == target else weight

    monkeypatch.setattr(Weights, "_take", swapped)
    assert worst(make(name), name) > 10 * LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_the_other_rope_style(name: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    build = Rope.__init__

    def other(self: Rope, *args: object) -> None:
        build(self, *args)  # type: ignore[arg-type]
        self.interleaved = not self.interleaved

    monkeypatch.setattr(Rope, "__init__", other)
    assert worst(make(name), name) > 10 * LIMIT


def test_a_forgotten_correction_bias(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    build = MixtureOfExperts.__init__

    def without(self: MixtureOfExperts, *args: object) -> None:
        build(self, *args)  # type: ignore[arg-type]
        self.bias = torch.zeros_like(self.bias)

    monkeypatch.setattr(MixtureOfExperts, "__init__", without)
    assert worst(make(DEEPSEEK), DEEPSEEK) > 10 * LIMIT


def test_a_wrong_softmax_scale(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    build = LatentAttention.__init__

    def wrong(self: LatentAttention, *args: object) -> None:
        build(self, *args)  # type: ignore[arg-type]
        self.scale *= 1.01

    monkeypatch.setattr(LatentAttention, "__init__", wrong)
    assert worst(make(DEEPSEEK), DEEPSEEK) > 5 * LIMIT


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
