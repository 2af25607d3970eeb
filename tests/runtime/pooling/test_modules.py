"""sentence-transformers directories: what `LLM.embed` returns, computed by hand from transformers' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.pooling.modules import Pooling, read_modules
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
MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def dense(inputs: int, outputs: int, activation: str, bias: bool = True) -> dict[str, Any]:
    torch.manual_seed(inputs + outputs)
    made = {"linear.weight": torch.randn(outputs, inputs) / inputs**0.5}
    if bias:
        made["linear.bias"] = torch.randn(outputs)
    return {
        "in_features": inputs,
        "out_features": outputs,
        "bias": bias,
        "activation_function": activation,
        **made,
    }


def vectors(llm: LLM, texts: Any, **options: Any) -> Tensor:
    return torch.from_numpy(np.stack([each.vector for each in llm.embed(texts, **options)]))


def means(model: Any, tokens: Sequence[Sequence[int]], skip: int = 0) -> Tensor:
    return torch.stack([hidden_states(model, each)[skip:].mean(0) for each in tokens])


def test_dense_then_cut_then_length_1(make: Callable[..., LLM], tmp_path: Path) -> None:
    """The order counts: of vectors of length 1 that are cut afterwards, none has length 1."""
    model = build("bert", tmp_path)
    layers = [
        dense(128, 48, "torch.nn.modules.activation.Tanh"),
        dense(48, 40, "torch.nn.modules.linear.Identity", False),
    ]
    modes = {"pooling_mode_max_tokens": True, **MEAN}
    write_modules(tmp_path, modes, layers, normalize=True, package="sentence_transformers.base.modules")
    llm, tokens = make(tmp_path), [ids(length) for length in LENGTHS]
    states = [hidden_states(model, each) for each in tokens]
    pooled = torch.stack([torch.cat((each.amax(0), each.mean(0))) for each in states])
    expected = (pooled @ layers[0]["linear.weight"].T + layers[0]["linear.bias"]).tanh() @ layers[1][
        "linear.weight"
    ].T
    for width in (None, 40, 16, 1):
        cut = torch.nn.functional.normalize(expected[:, :width], dim=-1)
        torch.testing.assert_close(vectors(llm, tokens, dimensions=width), cut, rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors(llm, tokens, normalize=False), expected, rtol=0, atol=2e-5)
    assert vectors(llm, tokens).dtype == torch.float32
    for width in (0, 41, True, "8"):
        with pytest.raises(UsageError, match="from 1 to 40"):
            llm.embed(tokens, dimensions=width)  # type: ignore[arg-type]


def test_without_modules_the_mean(make: Callable[..., LLM], tmp_path: Path) -> None:
    model, tokens = build("bert with a language head", tmp_path), [ids(length) for length in LENGTHS]
    torch.testing.assert_close(vectors(make(tmp_path), tokens), means(model, tokens), rtol=0, atol=1e-5)


def test_a_model_in_a_folder_of_its_own(make: Callable[..., LLM], tmp_path: Path) -> None:
    """As the first versions of sentence-transformers wrote it."""
    import json

    model = build("bert", tmp_path / "0_Transformer")
    write_modules(tmp_path, {"pooling_mode_cls_token": True})
    write_tokenizer(tmp_path / "0_Transformer")
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    entries = json.loads((tmp_path / "modules.json").read_text())
    entries[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(entries[::-1]))  # idx orders them
    llm = make(tmp_path)
    expected = hidden_states(model, [2, *ids(4), 3])[:1]
    torch.testing.assert_close(vectors(llm, text(4)), expected, rtol=0, atol=1e-5)
    with pytest.raises(RequestTooLarge, match="longer than 6"):
        llm.embed(text(5))


PUBLISHED = {
    "all-mpnet-base-v2": ("mpnet with a language head", MEAN, True, "cosine"),
    "multi-qa-distilbert-cos-v1": ("distilbert", MEAN, True, "cosine"),
    "multi-qa-distilbert-dot-v1": ("distilbert", {"pooling_mode_cls_token": True}, False, "dot"),
}
"""Directories like those of published models: encoder, pooling, whether Normalize follows, similarity."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_directories_like_published_ones(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Such a checkpoint has the encoder's tensors alone, under bare names, and positions as a tensor, whatever config.json names."""
    case, pooling, normalize, similarity = PUBLISHED[name]
    model = build(case, tmp_path)
    bare = {key: value.contiguous() for key, value in model.base_model.state_dict().items()}
    positions = {"embeddings.position_ids": torch.arange(320)[None]}
    save_file(bare | positions, tmp_path / "model.safetensors")
    write_modules(tmp_path, pooling, normalize=normalize, prompts={"similarity_fn_name": similarity})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    write_tokenizer(tmp_path)
    states = [hidden_states(model, [2, *ids(length), 3]) for length in LENGTHS]
    expected = torch.stack([each[0] if pooling is not MEAN else each.mean(0) for each in states])
    expected = torch.nn.functional.normalize(expected, dim=-1) if normalize else expected
    llm = make(tmp_path)
    found = vectors(llm, [text(length) for length in LENGTHS])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    scores = torch.tensor([each.score for each in llm.score(text(5), [text(length) for length in LENGTHS])])
    assert float((scores - expected @ expected[0]).abs().max() / scores.abs().max()) < 1e-5
    with pytest.raises(RequestTooLarge, match="longer than 40"):
        llm.embed(text(39))


@pytest.mark.parametrize("include", [True, False])
def test_prompts(include: bool, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Texts with a prompt; its tokens, with [CLS], are left out where include_prompt is false."""
    model = build("bert", tmp_path)
    prompts = {"prompts": {"query": "w9 w10 ", "none": ""}, "default_prompt_name": "query"}
    write_modules(tmp_path, {**MEAN, "include_prompt": include}, prompts=prompts)
    write_tokenizer(tmp_path)
    llm, skip = make(tmp_path), 0 if include else 3
    prompted = [[2, 9, 10, *ids(length), 3] for length in LENGTHS]
    texts = [text(length) for length in LENGTHS]
    expected = means(model, prompted, skip)
    for options in ({}, {"prompt_name": "query"}, {"prompt": "w9 w10 "}):
        torch.testing.assert_close(vectors(llm, texts, **options), expected, rtol=0, atol=1e-5)
    assert [each.prompt_tokens for each in llm.embed(texts)] == [len(each) for each in prompted]
    bare = [[2, *ids(length), 3] for length in LENGTHS]
    for options in ({"prompt_name": "none"}, {"prompt": ""}):
        torch.testing.assert_close(vectors(llm, texts, **options), means(model, bare), rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors(llm, bare), means(model, bare), rtol=0, atol=1e-5)  # ids get no prompt
    with pytest.raises(UsageError, match="no prompt 'passage'; it has: query, none"):
        llm.embed(texts, prompt_name="passage")
    with pytest.raises(UsageError, match="not both"):
        llm.embed(texts, prompt="w9", prompt_name="query")


def test_long_texts_are_refused_or_cut(make: Callable[..., LLM], tmp_path: Path) -> None:
    """By max_seq_length, and not by what tokenizer.json says (8 tokens)."""
    model = build("bert", tmp_path)
    write_modules(tmp_path, MEAN)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    write_tokenizer(tmp_path)
    llm = make(tmp_path)
    whole = [2, *ids(18), 3]
    torch.testing.assert_close(vectors(llm, [text(18)]), means(model, [whole]), rtol=0, atol=1e-5)
    with pytest.raises(RequestTooLarge, match="21 tokens is longer than 20"):
        llm.embed([text(3), text(19)])
    cut = vectors(llm, [text(300), text(18).upper()], truncate=True)
    torch.testing.assert_close(cut, means(model, [whole, whole]), rtol=0, atol=1e-5)
    with pytest.raises(RequestTooLarge):
        llm.embed([ids(21)], truncate=True)  # ids are used unchanged
    assert len(llm.embed(text(3))) == len(llm.embed(ids(3))) == 1
    shorter = make(tmp_path, max_model_len=5)
    with pytest.raises(RequestTooLarge, match="longer than 5"):
        shorter.embed(text(4))


def test_matryoshka_dimensions(make: Callable[..., LLM], tmp_path: Path) -> None:
    import json

    build("bert", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"matryoshka_dimensions": [32, 16]}))
    llm = make(tmp_path)
    assert llm.embed(ids(3), dimensions=16)[0].vector.shape == (16,)
    assert llm.embed(ids(3), dimensions=64)[0].vector.shape == (64,)
    with pytest.raises(UsageError, match="trained for 32, 16 dimensions, got 24"):
        llm.embed(ids(3), dimensions=24)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_cls_token": True}, Pooling(("cls",))),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, Pooling(("last",), False)),
        (
            {"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": True},
            Pooling(("mean", "weighted_mean")),
        ),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, Pooling(("last",))),
        ({"pooling_mode": ["mean_sqrt_len_tokens", "cls"]}, Pooling(("cls", "mean_sqrt_len"))),
    ],
)
def test_both_kinds_of_pooling_files(config: dict[str, Any], expected: Pooling, tmp_path: Path) -> None:
    write_modules(tmp_path, config)
    modules = read_modules(tmp_path)
    assert modules is not None and modules.pooling == expected


def test_no_modules(tmp_path: Path) -> None:
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"modules.json": "{}"}, "a list of modules"),
        ({"modules.json": "["}, "cannot read"),
        ({"modules.json": '[{"idx": 0, "path": "", "type": "a.Pooling"}]'}, "'Pooling' as module 0"),
        (
            {
                "modules.json": '[{"idx": 0, "path": "", "type": "a.Transformer"}, {"idx": 1, "path": "1", "type": "a.CNN"}]'
            },
            "CNN",
        ),
        ({"1_Pooling/config.json": "{}"}, "no mode of pooling"),
        ({"1_Pooling/config.json": '{"pooling_mode": "median"}'}, "median"),
        (
            {
                "2_Dense/config.json": '{"in_features": 64, "out_features": 8, "activation_function": "a.Mish"}'
            },
            "Mish",
        ),
        ({"config_sentence_transformers.json": '{"prompts": {"a": 1}}'}, "prompts must be texts"),
        ({"config_sentence_transformers.json": '{"default_prompt_name": "a"}'}, "one of them"),
        ({"config_sentence_transformers.json": '{"similarity_fn_name": "angle"}'}, "similarity_fn_name"),
    ],
)
def test_what_is_wrong_is_named(files: dict[str, str], what: str, tmp_path: Path) -> None:
    write_modules(tmp_path, MEAN, [dense(64, 8, "a.Identity")])
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=what):
        read_modules(tmp_path)


def test_dense_layers_that_do_not_fit(make: Callable[..., LLM], tmp_path: Path) -> None:
    build("bert", tmp_path)
    write_modules(tmp_path, MEAN, [dense(32, 8, "a.Identity")])
    with pytest.raises(ConfigError, match="takes 32 columns, and what it follows has 64"):
        make(tmp_path)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    write_modules(tmp_path, MEAN, [dense(64, 8, "a.Identity")])
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are never read"):
        make(tmp_path)


def test_what_is_no_text(make: Callable[..., LLM], tmp_path: Path) -> None:
    build("bert", tmp_path)
    llm = make(tmp_path)
    for wrong, what in (
        ([], "no texts"),
        ([[]], "empty"),
        ([[1, 300]], "from 0 to 299"),
        ([[-1]], "from 0 to 299"),
        ({"a": 1}, "texts are text"),
        (b"text", "got bytes"),
        ([1.5], "one dimension|token ids"),
        (["text"], "no tokenizer.json"),
    ):
        with pytest.raises(UsageError, match=what):
            llm.embed(wrong)  # type: ignore[arg-type]
