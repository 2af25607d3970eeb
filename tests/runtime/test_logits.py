"""Whole models compared with transformers: logits in float32, perplexity in bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch

from gristmill.runtime import runner
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import evaluate, window_logits, window_losses
from tests.runtime import kernel_sets, oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, NAMES

LIMIT = 2e-4
PERPLEXITY, WINDOWS = 1e-3, 16
"""Difference of losses equivalent to 0.1 % of perplexity, and the number of windows of 1,024 ids that it is
measured on."""


def largest_error(llm: LLM, name: str, index: int) -> float:
    """Returns the largest difference of a logit from transformers' over one window of 512 ids."""
    return float(
        (window_logits(llm.engine, oracle.window(index)) - oracle.window_logits(name, index)).abs().max()
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_window(name: str, shared: Callable[..., LLM]) -> None:
    assert largest_error(shared(name), name, 0) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel_set", kernel_sets.FAST)
def test_logits_of_eight_windows(name: str, kernel_set: str, make_strict: Callable[..., LLM]) -> None:
    llm = make_strict(name, kernel_set)
    assert max(largest_error(llm, name, index) for index in range(8)) <= LIMIT
    kernel_sets.check(llm, kernel_set)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_ids_of_a_short_prompt_by_triton(name: str, make_strict: Callable[..., LLM]) -> None:
    """In the interpreter: a prompt of five ids, then decoding from the cache."""
    llm, ids = make_strict(name, "triton"), oracle.window(0)[:5]
    assert float((window_logits(llm.engine, ids) - oracle.window_logits(name, 0)[:5]).abs().max()) <= LIMIT
    actual = oracle.Comparison(f"{name}, triton")
    (done,) = llm.generate([ids], SamplingParams(max_tokens=2))
    actual.add(done.token_ids, oracle.answer(name, tuple(ids), done.token_ids, 2))
    kernel_sets.check(llm, "triton")


def test_absorbed_and_unabsorbed_prefill_agree(
    shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, ids = shared(DEEPSEEK), oracle.window(2)
    direct = window_logits(llm.engine, ids)
    make_batch = runner.make_batch
    monkeypatch.setattr(
        runner, "make_batch", lambda *a, **k: dataclasses.replace(make_batch(*a, **k), lengths=())
    )
    absorbed = window_logits(llm.engine, ids)
    assert not torch.equal(direct, absorbed), "both took the same path"
    assert float((direct - absorbed).abs().max()) <= LIMIT


def test_window_losses_are_the_oracles(shared: Callable[..., LLM]) -> None:
    ids = oracle.window(3)
    assert float(window_losses(shared(DEEPSEEK).engine, ids).mean()) == pytest.approx(
        oracle.loss(oracle.oracle(DEEPSEEK), ids), abs=1e-5
    )


@cache
def bf16_loss(name: str) -> float:
    """Returns transformers' loss in bf16, nats per token; computed once."""
    model = oracle.load(oracle.MODELS / name, torch.bfloat16)
    return sum(oracle.loss(model, oracle.window(i, 1024)) for i in range(WINDOWS)) / WINDOWS


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel_set", kernel_sets.FAST)
def test_bf16_perplexity(name: str, kernel_set: str, make_strict: Callable[..., LLM]) -> None:
    """Perplexity is within 0.1 % of transformers' own in bf16."""
    llm = make_strict(name, kernel_set, dtype="bf16")
    evaluation = evaluate(llm.engine, oracle.eval_tokens(), 1024, WINDOWS)
    assert evaluation.tokens == WINDOWS * 1023
    assert evaluation.loss == pytest.approx(bf16_loss(name), abs=PERPLEXITY)
    kernel_sets.check(llm, kernel_set)


@pytest.mark.slow
def test_bf16_perplexity_sees_a_wrong_epsilon(make: Callable[..., LLM]) -> None:
    """Planted fault: the norms' epsilon of one layer is 0.1."""
    llm = make(LLAMA, dtype="bf16")
    llm.model.layers[1].mlp_norm.eps = 0.1  # type: ignore[attr-defined]
    assert abs(evaluate(llm.engine, oracle.eval_tokens(), 1024, WINDOWS).loss - bf16_loss(LLAMA)) > PERPLEXITY
