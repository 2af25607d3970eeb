"""Whole models against transformers in float32, and bf16 perplexity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime import runner
from gristmill.runtime.evaluate import evaluate, window_logits, window_losses
from gristmill.runtime.llm import LLM
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, NAMES

LIMIT = 2e-4
OURS = {"*": ("*_cpu",)}


def worst(llm: LLM, name: str, index: int) -> float:
    ids = oracle.window(index)
    return float((window_logits(llm.engine, ids) - oracle.logits(oracle.oracle(name), ids)).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_window(name: str, shared: Callable[..., LLM]) -> None:
    assert worst(shared(name), name, 0) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pins", ["*_torch", "*_cpu"])
def test_logits_of_eight_windows(name: str, pins: str, make: Callable[..., LLM], policy: Policy) -> None:
    llm = make(name, policy=dataclasses.replace(policy, pins={"*": (pins,)}, strict=True))
    assert max(worst(llm, name, index) for index in range(8)) <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_runs_our_own_kernel(name: str, make: Callable[..., LLM], policy: Policy) -> None:
    """Under a strict policy that names the C++ kernels nothing falls back, and the answer stays right."""
    llm = make(name, policy=dataclasses.replace(policy, pins=OURS, strict=True))
    ids = oracle.window(1)[:97]
    mine, theirs = window_logits(llm.engine, ids), oracle.logits(oracle.oracle(name), ids)
    assert float((mine - theirs).abs().max()) <= LIMIT
    assert {row["kernel"].rpartition("_")[2] for row in llm.explain()} == {"cpu"}


def test_absorbed_and_unabsorbed_prefill_agree(shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ids = shared(DEEPSEEK), oracle.window(2)
    direct = window_logits(llm.engine, ids)
    make_batch = runner.make_batch
    monkeypatch.setattr(runner, "make_batch", lambda *a, **k: dataclasses.replace(make_batch(*a, **k), fresh=False))
    absorbed = window_logits(llm.engine, ids)
    assert not torch.equal(direct, absorbed), "both took the same way"
    assert float((direct - absorbed).abs().max()) <= LIMIT


def test_window_losses_are_the_oracles(shared: Callable[..., LLM]) -> None:
    ids = oracle.window(3)
    assert float(window_losses(shared(DEEPSEEK).engine, ids).mean()) == pytest.approx(
        oracle.loss(oracle.oracle(DEEPSEEK), ids), abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bf16_perplexity(name: str, make: Callable[..., LLM]) -> None:
    """Within 0.1 % of transformers' own bf16."""
    windows, size = 16, 1024
    mine = evaluate(make(name, dtype="bf16").engine, oracle.eval_tokens(), size, windows)
    model = oracle.load(oracle.MODELS / name, torch.bfloat16)
    theirs = sum(oracle.loss(model, oracle.window(i, size)) for i in range(windows)) / windows
    assert mine.tokens == windows * (size - 1)
    assert mine.loss == pytest.approx(theirs, abs=1e-3)
