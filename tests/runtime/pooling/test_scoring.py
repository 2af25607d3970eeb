"""Scores and rankings: logits of a cross-encoder over both texts, and similarities of embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.scheduler import RequestTooLarge
from tests.runtime.pooling.encoder_cases import (
    build,
    hidden_states,
    ids,
    text,
    write_modules,
    write_tokenizer,
)

LENGTHS = (5, 1, 33, 2)
MEAN = {"pooling_mode_mean_tokens": True}


@torch.no_grad()
def logit(model: Any, query: list[int], document: list[int], types: bool = True) -> Tensor:
    """transformers' logit of a pair of texts, by their ids."""
    tokens = [2, *query, 3, *document, 3]
    kinds = [0] * (len(query) + 2) + [1] * (len(document) + 1)
    more = {"token_type_ids": torch.tensor([kinds])} if types else {}
    value: Tensor = model(torch.tensor([tokens]), **more).logits[0, 0]
    return value


def set_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def cross_encoder(make: Callable[..., LLM], folder: Path) -> tuple[LLM, Any]:
    """One with one class, and transformers' model."""
    model = build("bert classifier", folder, num_labels=1)
    write_tokenizer(folder)
    return make(folder), model


@pytest.fixture
def cross(make: Callable[..., LLM], tmp_path: Path) -> tuple[LLM, Any]:
    return cross_encoder(make, tmp_path)


def test_cross_encoder(cross: tuple[LLM, Any]) -> None:
    llm, model = cross
    documents = [text(length, 9) for length in LENGTHS]
    expected = torch.stack([logit(model, ids(4), ids(length, 9)) for length in LENGTHS])
    assert float((logit(model, ids(4), ids(5, 9), types=False) - expected[0]).abs()) > 1e-3
    scores = llm.score(text(4), documents)
    torch.testing.assert_close(
        torch.tensor([each.score for each in scores]), expected.sigmoid(), rtol=0, atol=1e-5
    )
    assert [each.prompt_tokens for each in scores] == [length + 7 for length in LENGTHS]
    plain = llm.score([text(4)] * 4, documents, activation="none")
    torch.testing.assert_close(torch.tensor([each.score for each in plain]), expected, rtol=0, atol=1e-5)
    ranking = llm.rerank(text(4), documents)
    assert [each.index for each in ranking] == expected.argsort(descending=True).tolist()
    assert [each.score for each in ranking] == [scores[each.index].score for each in ranking]
    assert llm.rerank(text(4), documents, 2) == ranking[:2]
    twice = llm.rerank(text(4), [documents[0], documents[0]])
    assert [each.index for each in twice] == [0, 1]


def test_long_pairs(cross: tuple[LLM, Any]) -> None:
    """The longer text is cut; [SEP] stays."""
    llm, model = cross
    with pytest.raises(RequestTooLarge, match="longer than 320"):
        llm.score(text(10), text(400))
    (score,) = llm.score(text(10), text(400), activation="none", truncate=True)
    assert score.prompt_tokens == 320
    assert abs(score.score - float(logit(model, ids(10), ids(307)))) < 1e-5


def test_wrong_uses(cross: tuple[LLM, Any]) -> None:
    llm, _ = cross
    with pytest.raises(UsageError, match="call score or rerank"):
        llm.embed("w5")
    with pytest.raises(UsageError, match="2 queries and 3 documents"):
        llm.score(["w5", "w6"], ["w5", "w6", "w7"])
    for queries, documents in (([], "w5"), ("w5", []), ([5], "w5"), ("w5", [[5]]), (None, "w5")):
        with pytest.raises(UsageError, match="must be a text or a list"):
            llm.score(queries, documents)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="activation must be"):
        llm.score("w5", "w5", activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one query"):
        llm.rerank(["w5"], ["w5"])  # type: ignore[arg-type]
    for top in (0, True, 1.5):
        with pytest.raises(UsageError, match="top_n"):
            llm.rerank("w5", ["w5"], top)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entries",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_the_activation_of_the_directory(
    entries: dict[str, Any], make: Callable[..., LLM], tmp_path: Path
) -> None:
    model = build("xlm-r classifier", tmp_path)
    write_tokenizer(tmp_path)
    set_config(tmp_path, **entries)
    expected = float(logit(model, ids(4), ids(6), types=False))  # type 1 is none of XLM-R's
    llm = make(tmp_path)
    assert abs(llm.score(text(4), text(6))[0].score - expected) < 1e-5
    (score,) = llm.score(text(4), text(6), activation="sigmoid")
    assert abs(score.score - float(torch.tensor(expected).sigmoid())) < 1e-5
    set_config(tmp_path, sbert_ce_default_activation_function="torch.nn.Tanh", sentence_transformers=None)
    with pytest.raises(ConfigError, match="Tanh"):
        make(tmp_path)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_of_embeddings(similarity: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build("bert", tmp_path)
    prompts = {"prompts": {"query": "w7 ", "passage": "w8 w9 "}, "similarity_fn_name": similarity}
    write_modules(tmp_path, MEAN, prompts=prompts)
    write_tokenizer(tmp_path)
    query = hidden_states(model, [2, 7, *ids(4), 3]).mean(0)
    documents = torch.stack([hidden_states(model, [2, 8, 9, *ids(n, 9), 3]).mean(0) for n in LENGTHS])
    expected = {
        "cosine": torch.nn.functional.cosine_similarity(query, documents),
        "dot": documents @ query,
        "euclidean": -(documents - query).square().sum(-1).sqrt(),
        "manhattan": -(documents - query).abs().sum(-1),
    }[similarity]
    llm = make(tmp_path)
    scores = llm.score(text(4), [text(n, 9) for n in LENGTHS])
    actual = torch.tensor([each.score for each in scores])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert scores[0].prompt_tokens == 7 + 9
    ranking = llm.rerank(text(4), [text(n, 9) for n in LENGTHS], top_n=3)
    assert [each.index for each in ranking] == expected.argsort(descending=True)[:3].tolist()
    with pytest.raises(UsageError, match="compares embeddings"):
        llm.score("w5", "w5", activation="sigmoid")


def test_tasks(make: Callable[..., LLM], tmp_path: Path) -> None:
    build("bert classifier", tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="3 classes"):
        make(tmp_path).score("w5", "w5")
    with pytest.raises(UsageError, match="task='score'"):
        make(tmp_path, task="embed")
    with pytest.raises(UsageError, match=r"LLM\.embed"):
        make(tmp_path, task="generate")
    with pytest.raises(UsageError, match="task must be one of"):
        make(tmp_path, task="classify")
