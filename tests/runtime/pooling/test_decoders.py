"""Decoders for pooling: hidden states over whole sequences, checkpoints without a head, classifiers, and answers to a question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.pooling.scoring import AnswerScorer
from gristmill.runtime.sequences import Sequences
from tests.runtime import family_cases
from tests.runtime.oracle import error
from tests.runtime.pooling.encoder_cases import (
    LENGTHS,
    VOCABULARY,
    hidden_states,
    ids,
    perturb,
    write_modules,
    write_tokenizer,
)

FAMILIES = [
    "mistral with a window",
    "olmo-3",
    "gemma-3",
    "glm-4",
    "granite-moe",
    "command-a",
    pytest.param("phi-3", marks=pytest.mark.slow),
    pytest.param("minimax-m2", marks=pytest.mark.slow),
]
QWEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def qwen(kind: str, folder: Path, **changes: Any) -> Any:
    """Saves and returns a small random Qwen3 of transformers."""
    import transformers

    torch.manual_seed(3)
    config = transformers.Qwen3Config(**{**QWEN, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"Qwen3{kind}")(config).float().eval()
    perturb(model)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def encoded(llm: LLM, tokens: list[list[int]]) -> list[Tensor]:
    model = llm.pooling.engine.model
    batch = Sequences.of(tokens, model.plans.device)
    return [*model.encode(batch).split(batch.lengths)]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_over_whole_sequences(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = family_cases.build(name, tmp_path)
    llm, tokens = make(tmp_path, task="embed"), [ids(length, length) for length in LENGTHS]
    for states, each in zip(encoded(llm, tokens), tokens, strict=True):
        expected = hidden_states(model, each)
        assert error(states, expected) < 1e-5
    last = hidden_states(model, tokens[0])[-1]
    (embedding,) = llm.embed(tokens[0])
    expected = torch.nn.functional.normalize(last, dim=0).numpy()
    assert float(np.abs(embedding.vector - expected).max()) < 1e-5
    with pytest.raises(UsageError, match="call embed"):
        llm.generate([[1, 2]])


@pytest.mark.parametrize("kind", ["TextModel", "ForCausalLM"])
def test_a_bidirectional_decoder(kind: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """As EmbeddingGemma: half of each window is on either side."""
    import transformers

    torch.manual_seed(4)
    settings = family_cases.SIZES | family_cases.CASES["gemma-3"][1] | {"use_bidirectional_attention": True}
    config = transformers.Gemma3TextConfig(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"Gemma3{kind}")(config).float().eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    llm, tokens = make(tmp_path), [ids(length, length) for length in LENGTHS]
    for states, each in zip(encoded(llm, tokens), tokens, strict=True):
        expected = hidden_states(model, each)
        assert error(states, expected) < 1e-5
    with pytest.raises(UsageError, match="generates no text"):
        make(tmp_path, task="generate")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
def test_embeddings_of_qwen(kind: str, tied: bool, make: Callable[..., LLM], tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: without a head, without ``model.`` in names; the tokenizer ends a text, the prompt begins a query."""
    model = qwen(kind, tmp_path, tie_word_embeddings=tied)
    prompts = {"prompts": {"query": "w8 w9 ", "document": ""}}
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, normalize=True, prompts=prompts)
    write_tokenizer(tmp_path)
    llm = make(tmp_path)
    given = [("w5 w6", "query", [2, 8, 9, 5, 6, 3]), ("w7", None, [2, 7, 3]), ("w7", "document", [2, 7, 3])]
    for text, name, tokens in given:
        (made,) = llm.embed(text, prompt_name=name, dimensions=24)
        expected = torch.nn.functional.normalize(hidden_states(model, tokens)[-1, :24], dim=0)
        assert float((torch.from_numpy(made.vector) - expected).abs().max()) < 1e-5
    if kind == "Model":
        with pytest.raises(UsageError, match="generates no text"):
            load_model(tmp_path, device="cpu")
        with pytest.raises(UsageError, match="generates no text"):
            make(tmp_path, task="generate")
    else:
        assert len(make(tmp_path, task="generate").generate([[5, 6]])) == 1


def test_a_classifier_over_a_decoder(make: Callable[..., LLM], tmp_path: Path) -> None:
    model = qwen("ForSequenceClassification", tmp_path, num_labels=1)
    write_tokenizer(tmp_path)
    llm = make(tmp_path)
    (score,) = llm.score("w5 w6", "w7", activation="none")
    with torch.no_grad():
        expected = float(model(torch.tensor([[2, 5, 6, 3, 7, 3]])).logits)
    assert abs(score.score - expected) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_the_answer_yes(
    tied: bool, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The softmax of the logits of "no" and "yes" after the last token of a template."""
    import json

    model = qwen("ForCausalLM", tmp_path, tie_word_embeddings=tied)
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match='the tokens "yes" and "no"'):
        make(tmp_path, task="score")
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["yes"], vocabulary["no"] = vocabulary.pop("w299"), vocabulary.pop("w298")
    path.write_text(json.dumps(data))
    monkeypatch.setattr(AnswerScorer, "before", "w10 w11")
    monkeypatch.setattr(AnswerScorer, "after", "w12 w13 w14")
    llm = make(tmp_path, task="score")
    unknown = 1  # <Instruct>: and such are no words of this tokenizer
    head = [10, 11, unknown, 20, 21, unknown, 5, 6, unknown]
    documents, tail = {"w7": [7], "w8 w9": [8, 9]}, [12, 13, 14]
    for document, tokens in documents.items():
        (score,) = llm.score("w5 w6", document, instruction="w20 w21")
        with torch.no_grad():
            logits = model(torch.tensor([[*head, *tokens, *tail]])).logits[0, -1]
        assert score.prompt_tokens == len(head) + len(tokens) + 3
        assert abs(score.score - float(logits[[298, 299]].softmax(0)[1])) < 1e-5
        (plain,) = llm.score("w5 w6", document, instruction="w20 w21", activation="none")
        assert abs(plain.score - float(logits[299] - logits[298])) < 1e-4
    assert llm.score("w5", "w7")[0].score != llm.score("w5", "w7", instruction="w20")[0].score
    short = make(tmp_path, task="score", max_model_len=12)
    with torch.no_grad():
        logits = model(torch.tensor([[*head[:9], 12, 13, 14]])).logits[0, -1]
    (cut,) = short.score("w5 w6", "w7 w8", instruction="w20 w21", truncate=True)
    assert abs(cut.score - float(logits[[298, 299]].softmax(0)[1])) < 1e-5
    with pytest.raises(UsageError, match="call score"):
        llm.embed("w5")


def test_what_cannot_pool_is_named(make: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="latent attention needs a KV cache"):
        make("docs-deepseek", task="embed")
    family_cases.build("gemma-2", tmp_path)
    with pytest.raises(UsageError, match="caps of scores"):
        make(tmp_path, task="embed")
    qwen("ForCausalLM", tmp_path / "q")
    with pytest.raises(UsageError, match="task='embed'"):
        make(tmp_path / "q").embed([[1]])
    with pytest.raises(ConfigError, match="no tokenizer"):
        make(tmp_path / "q", task="score")
