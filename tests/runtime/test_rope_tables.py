"""Tables of rotary embeddings have a row for each position that the engine reaches, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from gristmill.runtime.layers import rope
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation.config import Speculation
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.family_cases import build, prompt
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

LIMIT = 96
SCOUT = 10 << 20
"""The positions of Llama 4 Scout."""
PARAMS = SamplingParams(max_tokens=LIMIT, temperature=0, ignore_eos=True)
PROMPTS = [prompt(80), prompt(3), prompt(95)]


def tables(model: Any) -> list[Tensor]:
    """The tables of a model, each once."""
    attentions = [getattr(layer.attention, "attend", None) for layer in model.layers]
    attentions = [
        inner if hasattr(inner, "rope") else layer.attention
        for inner, layer in zip(attentions, model.layers, strict=True)
    ]
    return [*{id(each.rope.table): each.rope.table for each in attentions}.values()]


def answers(llm: LLM) -> list[list[int]]:
    done = llm.generate(PROMPTS, PARAMS)
    assert all(len(p) + len(d.token_ids) == LIMIT for p, d in zip(PROMPTS, done, strict=True))
    return [list(each.token_ids) for each in done]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_positions_that_are_not_reached_take_no_memory(
    ranks: int, make: Callable[..., LLM], tmp_path: Path
) -> None:
    """A model with the positions of Llama 4 Scout, whose tables would take 690 MB for these heads of 16: ids are those of a short one. The last
    request ends at the limit, the padding of graphs included."""
    build("llama-4", tmp_path)
    expected = make(tmp_path).generate(PROMPTS, SamplingParams(max_tokens=LIMIT, temperature=0))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": SCOUT}))
    llm = make(tmp_path, max_model_len=LIMIT, tensor_parallel=ranks, max_chunk=32)
    try:
        actual = answers(llm)
        if ranks == 1:
            assert [table.shape for table in tables(llm.model)] == [(LIMIT, 16), (LIMIT, 2)]
        assert actual == [list(e.token_ids[: len(a)]) for e, a in zip(expected, actual, strict=True)]
        assert llm.config.max_position == LIMIT
    finally:
        llm.close()


@pytest.mark.parametrize("lacking", [1, 2])
def test_a_table_that_is_too_short_shows(
    lacking: int, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the last token of a request is not read any more, so one row less changes nothing, and two rows make logits NaN."""
    build("llama", tmp_path)
    expected = answers(make(tmp_path, max_model_len=LIMIT))
    made = rope.rope_cache
    monkeypatch.setattr(rope, "rope_cache", lambda rot, rows, *rest: made(rot, rows - lacking, *rest))
    done = make(tmp_path, max_model_len=LIMIT).generate(PROMPTS, PARAMS)
    assert ([list(each.token_ids) for each in done] == expected) == (lacking == 1)
    assert any(each.error for each in done) == (lacking == 2)


@pytest.mark.parametrize("family", ["llama", "glm-4", "kimi-k2"])
def test_longrope_of_any_family(family: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Both sets of frequencies, in families whose files usually have none: the second one for sequences longer than the original length."""
    pairs = {"llama": 8, "glm-4": 4, "kimi-k2": 8}[family]
    table = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [4.0 + pair for pair in range(pairs)],
        "partial_rotary_factor": 0.5 if family == "glm-4" else 1.0,
    }
    model = build(family, tmp_path, rope_parameters=table)
    for length, longest in ((64, None), (LIMIT, LIMIT)):
        llm = make(tmp_path, max_model_len=longest)
        assert llm.config.max_position == length
        expected = oracle.logits(model, prompt(length))
        assert oracle.error(window_logits(llm.engine, prompt(length)), expected) < 1e-4


def test_drafts_up_to_the_limit(make: Callable[..., LLM]) -> None:
    """More drafts than tokens that are left: no id changes, and the tables of the draft model are as short."""
    drafting = Speculation("draft", 5, MODELS / DEEPSEEK, adaptive=False)
    llm = make(LLAMA, max_model_len=LIMIT, speculate=drafting)
    assert answers(llm) == answers(make(LLAMA, max_model_len=LIMIT))
    speculator: Any = llm.engine.speculator
    assert [len(table) for table in tables(speculator.proposer.runner.model)] == [LIMIT]
    status = llm.engine.status().speculation
    assert status is not None and status.drafts > 10


def test_new_weights(make: Callable[..., LLM], tmp_path: Path) -> None:
    """They are those of the same model, of which the engine reaches fewer positions."""
    build("phi-4-mini", tmp_path)
    for length in (LIMIT, 450):
        llm = make(tmp_path, max_model_len=length)
        before = [list(each.token_ids) for each in llm.generate(PROMPTS, SamplingParams(max_tokens=5))]
        llm.engine.update_weights(tmp_path)
        assert [list(e.token_ids) for e in llm.generate(PROMPTS, SamplingParams(max_tokens=5))] == before


def test_pooling_by_a_decoder(make: Callable[..., LLM], tmp_path: Path) -> None:
    build("qwen3", tmp_path)
    short = make(tmp_path, task="embed", max_model_len=LIMIT)
    (found,) = short.embed([prompt(LIMIT)])
    front: Any = short.pooling
    assert [len(table) for table in tables(front.engine.model)] == [LIMIT]
    (whole,) = make(tmp_path, task="embed").embed([prompt(LIMIT)])
    assert np.array_equal(found.vector, whole.vector)
