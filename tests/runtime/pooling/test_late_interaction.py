"""ColBERT as PyLate writes it: prefixes, queries filled up with masks, skipped tokens, and the sum of the best products."""

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
from gristmill.runtime.pooling.late_interaction import best_products
from gristmill.runtime.scheduler import RequestTooLarge
from tests.runtime.pooling.encoder_cases import build, ids, text, write_modules, write_tokenizer

LATE = {
    "query_prefix": "w250",
    "document_prefix": "w251",
    "query_length": 12,
    "document_length": 40,
    "skiplist_words": ["w11", "absent"],
    "similarity_fn_name": "MaxSim",
}


@torch.no_grad()
def vectors(model: Any, weight: Tensor, tokens: list[int], seen: int | None = None) -> Tensor:
    """Vectors [tokens, D] of length 1 by transformers, with attention to the first `seen` tokens alone."""
    mask = torch.ones(1, len(tokens), dtype=torch.int64)
    if seen is not None:
        mask[:, seen:] = 0
    states = model.base_model(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0]
    return torch.nn.functional.normalize(states @ weight.T, dim=-1)


ENCODERS = ("bert", "modernbert")


def write(name: str, folder: Path) -> tuple[Path, Any, Tensor]:
    """Writes a directory; returns it, transformers' model, and the weight of the projection. ModernBERT has windows shorter than its queries."""
    changes = {"local_attention": 12} if name == "modernbert" else {}
    model = build(name, folder, **changes)
    weight = torch.randn(16, 64)
    write_tokenizer(folder)
    dense = {"in_features": 64, "out_features": 16, "bias": False, "activation_function": "torch.nn.Identity"}
    write_modules(
        folder, None, [{**dense, "linear.weight": weight}], prompts=LATE, package="pylate.models.Dense"
    )
    return folder, model, weight


@pytest.fixture(params=ENCODERS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, Tensor]:
    return write(request.param, tmp_path)


def expected_vectors(model: Any, weight: Tensor, length: int, query: bool, expand: bool = True) -> Tensor:
    if query:
        tokens = [2, 250, *ids(length), 3]
        return vectors(model, weight, tokens + [4] * (12 - len(tokens)) * expand, len(tokens))
    tokens = [2, 251, *ids(length, 9), 3]
    return vectors(model, weight, tokens)[[token != 11 for token in tokens]]


def test_vectors_and_scores(directory: tuple[Path, Any, Tensor], make: Callable[..., LLM]) -> None:
    folder, model, weight = directory
    llm = make(folder)
    assert 11 in ids(30, 9)
    lengths = (30, 1, 7)
    documents = [expected_vectors(model, weight, length, False) for length in lengths]
    for made, expected in zip(llm.embed([text(length, 9) for length in lengths]), documents, strict=True):
        assert made.vector.shape == expected.shape
        torch.testing.assert_close(torch.from_numpy(made.vector), expected, rtol=0, atol=1e-5)
    query = expected_vectors(model, weight, 4, True)
    assert query.shape == (12, 16)
    (made,) = llm.embed(text(4), prompt_name="query")
    torch.testing.assert_close(torch.from_numpy(made.vector), query, rtol=0, atol=1e-5)
    best = torch.stack([(query @ document.T).amax(1).sum() for document in documents])
    scores = llm.score(text(4), [text(length, 9) for length in lengths])
    torch.testing.assert_close(torch.tensor([each.score for each in scores]), best, rtol=0, atol=1e-4)
    assert [each.prompt_tokens for each in scores] == [12 + length + 3 for length in lengths]
    ranking = llm.rerank(text(4), [text(length, 9) for length in lengths])
    assert [each.index for each in ranking] == best.argsort(descending=True).tolist()
    cut = torch.nn.functional.normalize(documents[1][:, :8], dim=-1)
    (made,) = llm.embed(text(1, 9), dimensions=8)
    torch.testing.assert_close(torch.from_numpy(made.vector), cut, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["attend", "no expansion"])
def test_other_queries(kind: str, directory: tuple[Path, Any, Tensor], make: Callable[..., LLM]) -> None:
    folder, model, weight = directory
    more = {"attend_to_expansion_tokens": True} if kind == "attend" else {"do_query_expansion": False}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(LATE | more))
    tokens = [2, 250, *ids(4), 3] + ([4] * 5 if kind == "attend" else [])
    (made,) = make(folder).embed(text(4), prompt_name="query")
    torch.testing.assert_close(
        torch.from_numpy(made.vector), vectors(model, weight, tokens), rtol=0, atol=1e-5
    )


def test_lengths_and_wrong_uses(directory: tuple[Path, Any, Tensor], make: Callable[..., LLM]) -> None:
    folder, model, weight = directory
    llm = make(folder)
    with pytest.raises(RequestTooLarge, match="a query of 12 tokens is longer than 11"):
        llm.score(text(10), text(3))
    with pytest.raises(RequestTooLarge, match="a document of 40 tokens is longer than 39"):
        llm.score(text(3), text(38))
    (score,) = llm.score(text(100), text(100, 9), truncate=True)
    query, document = (expected_vectors(model, weight, length, length == 9) for length in (9, 37))
    assert score.prompt_tokens == 52
    assert abs(score.score - float((query @ document.T).amax(1).sum())) < 1e-4
    with pytest.raises(UsageError, match="'query' or 'document'"):
        llm.embed(text(3), prompt_name="passage")
    with pytest.raises(UsageError, match="prefixes and no prompts"):
        llm.embed(text(3), prompt="w5")
    with pytest.raises(UsageError, match="a text or a list"):
        llm.embed([5, 6])
    with pytest.raises(UsageError, match="vectors of tokens"):
        llm.score("w5", "w6", activation="none")
    for changes, what in (({"query_prefix": "[Q] "}, "is no token"), ({"query_length": 0}, "query_length")):
        (folder / "config_sentence_transformers.json").write_text(json.dumps(LATE | changes))
        with pytest.raises(ConfigError, match=what):
            make(folder)


def test_best_products() -> None:
    query, document = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])
    assert float(best_products(query, document)) == pytest.approx(1 + 2**-0.5)
    assert float(best_products(query, document[:0])) == 0
