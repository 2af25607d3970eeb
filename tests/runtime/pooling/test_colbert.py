"""Directories of Stanford ColBERT: vectors and scores by its own steps, over transformers' encoder and the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from gristmill.runtime.errors import CheckpointError, ConfigError
from gristmill.runtime.llm import LLM
from gristmill.runtime.scheduler import RequestTooLarge
from tests.runtime.pooling.encoder_cases import build, text, write_modules, write_tokenizer

METADATA = {
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_token": "[Q]",
    "doc_token": "[D]",
    "dim": 16,
    "similarity": "cosine",
    "query_maxlen": 12,
    "doc_maxlen": 40,
    "attend_to_mask_tokens": False,
    "mask_punctuation": True,
    "interaction": "colbert",
    "ncells": None,
}
WORDS = {"w290": "[unused0]", "w291": "[unused1]", "w292": ".", "w293": ",", "w294": "!"}
QUERIES = ["w7 w8 , w9", text(9), "w20"]
DOCUMENTS = ["w7 w8 . w9 !", text(30, 9), "w21 , w22 , w23", "!"]


@dataclass
class Stanford:
    """ColBERT's steps: a full stop in the place of the marker, padding that becomes masks, an attention mask, punctuation that does not count."""

    model: Any
    weight: Tensor
    tokenizer: Tokenizer
    metadata: dict[str, Any]

    def encoded(self, content: str, length: int, marker: int, fill: bool) -> tuple[Tensor, Tensor]:
        """Ids [1, n] and attention mask."""
        self.tokenizer.enable_truncation(length)
        self.tokenizer.no_padding()
        if fill:
            self.tokenizer.enable_padding(length=length, pad_id=0)
        made = self.tokenizer.encode(". " + content)
        ids, mask = torch.tensor([made.ids]), torch.tensor([made.attention_mask])
        ids[:, 1] = marker
        ids[ids == 0] = 4
        return ids, mask

    @torch.no_grad()
    def vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[tokens, dim], of length 1."""
        states = self.model.base_model(ids, attention_mask=mask).last_hidden_state[0]
        return torch.nn.functional.normalize(states @ self.weight.T, dim=-1)

    def query(self, content: str) -> Tensor:
        """A vector for each token, masks included."""
        ids, mask = self.encoded(content, self.metadata["query_maxlen"], 290, True)
        if self.metadata["attend_to_mask_tokens"]:
            mask[ids == 4] = 1
        return self.vectors(ids, mask)

    def document(self, content: str) -> Tensor:
        """A vector for each token that is no punctuation."""
        ids, mask = self.encoded(content, self.metadata["doc_maxlen"], 291, False)
        skipped = (292, 293, 294) if self.metadata["mask_punctuation"] else ()
        return self.vectors(ids, mask)[[token not in skipped for token in ids[0].tolist()]]


def write(folder: Path, case: str = "bert", base: str = "bert", **changes: Any) -> Stanford:
    """Writes a directory around the encoder of a case."""
    # Positions of RoBERTa's depend on the padding id, which is no mask.
    model = build(case, folder, **({"pad_token_id": 1} if base == "roberta" else {}))
    torch.manual_seed(11)
    weight = torch.randn(16, 64)
    tensors = {f"{base}.{name}": value.contiguous() for name, value in model.base_model.state_dict().items()}
    save_file({**tensors, "linear.weight": weight}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    metadata = METADATA | changes
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    for word, name in WORDS.items():
        data["model"]["vocab"][name] = data["model"]["vocab"].pop(word)
    path.write_text(json.dumps(data))
    return Stanford(model, weight, Tokenizer.from_file(str(path)), metadata)


CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "masks are attended to": {"attend_to_mask_tokens": True},
    "punctuation counts": {"mask_punctuation": False},
    "xlm-r": {"case": "xlm-r", "base": "roberta"},
    "distilbert": {"case": "distilbert", "base": "distilbert"},
}


@pytest.mark.parametrize("name", CASES)
def test_vectors_and_scores(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    theirs, llm = write(tmp_path, **CASES[name]), make(tmp_path)
    queries, documents = [*map(theirs.query, QUERIES)], [*map(theirs.document, DOCUMENTS)]
    assert [len(each) for each in queries] == [12] * 3
    assert len(documents[0]) == (6 if name != "punctuation counts" else 8)
    for role, texts, expected in (("query", QUERIES, queries), ("document", DOCUMENTS, documents)):
        for one, rows in zip(llm.embed(texts, prompt_name=role), expected, strict=True):
            assert one.vector.shape == rows.shape
            assert float((torch.from_numpy(one.vector) - rows).abs().max()) < 1e-5
    for content, query in zip(QUERIES, queries, strict=True):
        best = torch.stack([(query @ document.T).amax(1).sum() for document in documents])
        found = torch.tensor([each.score for each in llm.score(content, DOCUMENTS)])
        torch.testing.assert_close(found, best, rtol=0, atol=1e-4)
        ranking = llm.rerank(content, DOCUMENTS)
        assert [each.index for each in ranking] == best.argsort(descending=True).tolist()


def test_texts_that_are_cut(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Lengths count markers and special tokens."""
    theirs, llm = write(tmp_path), make(tmp_path)
    with pytest.raises(RequestTooLarge, match="a query of 12 tokens is longer than 11"):
        llm.score(text(10), "w5")
    query, document = theirs.query(text(60)), theirs.document(text(60, 9))
    assert (len(query), len(document)) == (12, 40)
    (score,) = llm.score(text(60), text(60, 9), truncate=True)
    assert abs(score.score - float((query @ document.T).amax(1).sum())) < 1e-4


def test_without_metadata(make: Callable[..., LLM], tmp_path: Path) -> None:
    """ColBERT's own values: 32 tokens of a query."""
    theirs = write(tmp_path, query_maxlen=32)
    (tmp_path / "artifact.metadata").unlink()
    (made,) = make(tmp_path).embed(QUERIES[0], prompt_name="query")
    assert float((torch.from_numpy(made.vector) - theirs.query(QUERIES[0])).abs().max()) < 1e-5


def test_modules_come_first(make: Callable[..., LLM], tmp_path: Path) -> None:
    """A directory with both is read as sentence-transformers reads it; its config.json still names ColBERT."""
    theirs = write(tmp_path)
    write_modules(tmp_path, {"pooling_mode_cls_token": True})
    (made,) = make(tmp_path).embed([2, 7, 3])
    with torch.no_grad():
        expected = theirs.model(torch.tensor([[2, 7, 3]])).last_hidden_state[0, 0]
    torch.testing.assert_close(torch.from_numpy(made.vector), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"similarity": "l2"}, "similarity must be cosine, got 'l2'"),
        ({"interaction": "flipr"}, "interaction must be colbert"),
        ({"dim": 32}, "dim is 32, and linear.weight has 16 rows"),
        ({"query_maxlen": 0}, "query_maxlen"),
        ({"doc_token_id": "[unused7]"}, r"the prefix '\[unused7\]' is no token"),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], what: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=what):
        make(tmp_path)


def test_what_is_missing(make: Callable[..., LLM], tmp_path: Path) -> None:
    """The projection, or a family for the encoder."""
    theirs = write(tmp_path)
    bare = {f"bert.{name}": value.contiguous() for name, value in theirs.model.state_dict().items()}
    save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor linear\.weight"):
        make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nomic_bert"}))
    with pytest.raises(ConfigError, match="architecture HF_ColBERT is not supported"):
        make(tmp_path)
