"""Classes of texts: what `LLM.classify` returns, against transformers' logits and config."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.pooling.classes import Classification
from gristmill.runtime.scheduler import RequestTooLarge
from tests.runtime.pooling.encoder_cases import build, ids, text, write_tokenizer
from tests.runtime.pooling.test_decoders import qwen

PLACES = ((5, 0), (1, 0), (33, 0), (5, 14))
"""Length and start of each text; the last one has another class than the first."""
LABELS = {0: "sad", 1: "glad", 2: "neither"}
TEXTS = [text(*place) for place in PLACES]
FUNCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda logits: logits.softmax(-1),
    "single_label_classification": lambda logits: logits.softmax(-1),
    "multi_label_classification": torch.sigmoid,
    "regression": lambda logits: logits,
}


@torch.no_grad()
def logits(model: Any, *tokens: list[int]) -> Tensor:
    """transformers' logits of each sequence, by itself."""
    return torch.cat([model(torch.tensor([each])).logits for each in tokens])


def of_texts(model: Any) -> Tensor:
    """Of TEXTS."""
    return logits(model, *([2, *ids(*place), 3] for place in PLACES))


def stacked(found: list[Classification]) -> Tensor:
    return torch.from_numpy(np.stack([one.values for one in found]))


@pytest.fixture
def classifier(make: Callable[..., LLM], tmp_path: Path) -> tuple[LLM, Any]:
    """One of three classes, and transformers' model."""
    model = build("distilbert classifier", tmp_path, id2label=LABELS)
    write_tokenizer(tmp_path)
    return make(tmp_path), model


@pytest.mark.parametrize("problem", FUNCTIONS)
def test_what_becomes_of_the_logits(problem: str | None, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build("distilbert classifier", tmp_path, id2label=LABELS, problem_type=problem)
    write_tokenizer(tmp_path)
    llm, expected = make(tmp_path), of_texts(model)
    found = llm.classify(TEXTS)
    torch.testing.assert_close(stacked(found), FUNCTIONS[problem](expected), rtol=0, atol=1e-5)
    for other, function in FUNCTIONS.items():  # the check tells them apart
        if function(torch.ones(2)).tolist() != FUNCTIONS[problem](torch.ones(2)).tolist():
            assert float((stacked(found) - FUNCTIONS[other](expected)).abs().max()) > 1e-2
    assert [one.label for one in found] == [LABELS[int(row.argmax())] for row in expected]
    assert len({one.label for one in found}) > 1
    assert [one.prompt_tokens for one in found] == [length + 2 for length, _ in PLACES]
    assert found[0].labels == ("sad", "glad", "neither") and found[0].values.dtype == np.float32
    for activation, function in (("softmax", None), ("sigmoid", "multi_label_classification")):
        named = stacked(llm.classify(TEXTS, activation=activation))  # type: ignore[arg-type]
        torch.testing.assert_close(named, FUNCTIONS[function](expected), rtol=0, atol=1e-5)
    raw = stacked(llm.classify(TEXTS, activation="none"))
    torch.testing.assert_close(raw, expected, rtol=0, atol=2e-5)


def test_pairs_ids_and_long_texts(make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build("bert classifier", tmp_path)
    write_tokenizer(tmp_path)
    llm, pair = make(tmp_path), [2, *ids(4), 3, *ids(6, 9), 3]
    with torch.no_grad():
        types = torch.tensor([[0] * 6 + [1] * 7])
        expected = model(torch.tensor([pair]), token_type_ids=types).logits
    found = llm.classify([(text(4), text(6, 9)), [2, *ids(5), 3], text(5)], activation="none")
    torch.testing.assert_close(stacked(found[:1]), expected, rtol=0, atol=1e-5)
    assert float((expected - logits(model, pair)).abs().max()) > 1e-3
    assert found[0].prompt_tokens == len(pair)
    assert found[1].values.tolist() == pytest.approx(found[2].values.tolist(), abs=1e-5)
    assert found[0].labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    (one,) = llm.classify(ids(5), activation="none")
    torch.testing.assert_close(stacked([one]), logits(model, ids(5)), rtol=0, atol=1e-5)
    with pytest.raises(RequestTooLarge, match="longer than 320"):
        llm.classify(text(400))
    (cut,) = llm.classify(text(400), activation="none", truncate=True)
    torch.testing.assert_close(stacked([cut]), logits(model, [2, *ids(318), 3]), rtol=0, atol=1e-5)


def test_over_a_decoder(make: Callable[..., LLM], tmp_path: Path) -> None:
    """The last token's."""
    model = qwen("ForSequenceClassification", tmp_path, id2label=LABELS)
    write_tokenizer(tmp_path)
    torch.testing.assert_close(
        stacked(make(tmp_path).classify(TEXTS)), of_texts(model).softmax(-1), rtol=0, atol=1e-5
    )


def test_coroutines(classifier: tuple[LLM, Any]) -> None:
    llm, model = classifier

    async def run() -> None:
        async with AsyncEngine(llm) as engine:
            found = await asyncio.gather(*(engine.classify(one, activation="none") for one in TEXTS))
            values = stacked([one for each in found for one in each])
            torch.testing.assert_close(values, of_texts(model), rtol=0, atol=1e-5)
            with pytest.raises(UsageError, match="activation must be"):
                await engine.classify("w5", activation="tanh")  # type: ignore[arg-type]

    asyncio.run(run())


def test_wrong_uses(
    classifier: tuple[LLM, Any], make: Callable[..., LLM], shared: Callable[..., LLM], tmp_path: Path
) -> None:
    llm, _ = classifier
    for texts in ([], [[]], [["w5", "w6"]], [("w5", "w6", "w7")], [None], 5):
        with pytest.raises(UsageError):
            llm.classify(texts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="activation must be one of softmax, sigmoid, none"):
        llm.classify("w5", activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="3 classes for a pair of texts.*call classify"):
        llm.score("w5", "w6")
    with pytest.raises(UsageError, match="has classes of texts and has no embeddings: call classify"):
        llm.embed("w5")
    build("bert classifier", tmp_path / "one", num_labels=1)
    write_tokenizer(tmp_path / "one")
    with pytest.raises(UsageError, match="has one label, which is a score: call score or rerank"):
        make(tmp_path / "one").classify("w5")
    build("bert", tmp_path / "none")
    with pytest.raises(UsageError, match="has no classifier, it makes embeddings: call embed"):
        make(tmp_path / "none").classify([5])
    with pytest.raises(UsageError, match="generates text"):
        shared("docs-llama").classify("w5")


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"problem_type": "ranking"}, "problem_type must be one of single_label_classification"),
        ({"id2label": {"0": "a", "2": "b", "3": "c"}}, "id2label must name the classes 0 to 2, got 0, 2, 3"),
        ({"id2label": {"0": "a", "one": "b", "2": "c"}}, "id2label must name the classes 0 to 2"),
    ],
)
def test_entries_that_are_wrong(
    entries: dict[str, Any], what: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    build("bert classifier", tmp_path)
    write_tokenizer(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(ConfigError, match=what):
        make(tmp_path)
