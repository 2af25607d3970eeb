"""Every encoder's hidden states equal to transformers', over lengths and batches in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.layers import position_bias
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader import load
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.models import Encoder
from gristmill.runtime.sequences import Sequences
from tests.runtime.oracle import error, excess
from tests.runtime.pooling.encoder_cases import ARCHITECTURES, CASES, LENGTHS, build, hidden_states, ids
from tests.runtime.proofs import GREEDY, proves

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"activation": "gelu_tanh"}),
    ("bert", {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}),
    ("bert with other sizes", {"rms_eps": 1e-2}),
    ("modernbert", {"windows": ()}),
    ("modernbert", {"windows": (0, 9, 9, 0, 9, 9, 0)}),
    ("modernbert", {"layer_ropes": ()}),
    ("modernbert", {"activation": "silu"}),
    ("roberta", {"extra": {"types": 1, "first_position": 0, "head": "tanh"}, "max_position": 320}),
    ("distilbert", {"activation": "gelu_tanh"}),
    ("distilbert", {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}),
    ("mpnet", {"extra": {"types": 0, "first_position": 0, "head": "tanh"}, "max_position": 320}),
]
"""Configurations that a family could read wrongly, by the entries that are wrong."""


def encoder(llm: LLM) -> Encoder:
    return llm.pooling.engine.model


@torch.inference_mode()
def encoded(
    model: Encoder, tokens: list[list[int]], types: list[list[int] | None] | None = None
) -> list[Tensor]:
    """Hidden states of each sequence, computed in one batch on the model's device."""
    batch = Sequences.of(tokens, model.plans.device, types)
    return [*model.encode(batch).split(batch.lengths)]


@proves("logits and ids", GREEDY, ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, tmp_path)
    ours = encoder(make(tmp_path))
    tokens = [ids(length, 3 * length) for length in LENGTHS]
    expected = [hidden_states(model, each) for each in tokens]
    for order in (range(len(tokens)), [*reversed(range(len(tokens)))], [2], [1]):
        for index, states in zip(order, encoded(ours, [tokens[i] for i in order]), strict=True):
            assert error(states, expected[index]) < 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if "classifier" in name])
def test_logits_of_classes(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, tmp_path)
    ours, tokens = encoder(make(tmp_path)), [ids(length, length) for length in LENGTHS]
    with torch.inference_mode():
        batch = Sequences.of(tokens, ours.plans.device)
        logits = ours.classify(ours.encode(batch), batch)
    assert logits.shape == (len(tokens), model.config.num_labels)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([each])).logits for each in tokens])
    assert error(logits, expected) < 1e-5


def test_the_function_of_a_classifier_shows(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parse = build("distilbert classifier", tmp_path), load.parse_config

    def wrong(*parts: Any) -> Any:
        config = parse(*parts)
        return replace(config, extra={**config.extra, "head": "tanh"})

    monkeypatch.setattr(load, "parse_config", wrong)
    ours, batch = encoder(make(tmp_path)), Sequences.of([ids(9)])
    with torch.inference_mode():
        logits = ours.classify(ours.encode(batch), batch)
        assert error(logits, model(torch.tensor([ids(9)])).logits) > 1e-3


def test_buckets_of_distances() -> None:
    """Those of transformers, whose edges depend on the rounding of a logarithm."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    ahead = torch.arange(-3000, 3000)
    assert torch.equal(position_bias.bucket(ahead, 32), MPNetEncoder.relative_position_bucket(ahead))


@pytest.mark.parametrize("fault", ["other buckets", "other direction"])
def test_a_wrong_bias_of_positions_shows(
    fault: str, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, right = build("mpnet", tmp_path), position_bias.bucket
    if fault == "other buckets":
        monkeypatch.setattr(position_bias, "FARTHEST", 100)
    else:
        monkeypatch.setattr(position_bias, "bucket", lambda ahead, buckets: right(-ahead, buckets))
    (states,) = encoded(encoder(make(tmp_path)), [ids(150)])
    assert error(states, hidden_states(model, ids(150))) > 1e-4


@pytest.mark.parametrize("seen", [[None, 100, 100], [150, 100, None], [None, None, 100]])
def test_tokens_that_others_do_not_see(
    seen: list[int | None], make: Callable[..., LLM], tmp_path: Path
) -> None:
    """Of late interaction, where there is a bias of positions, too."""
    model = build("mpnet", tmp_path)
    batch = Sequences.of([ids(150)] * 3, seen=seen)
    with torch.inference_mode():
        part = model(
            torch.tensor([ids(150)]), attention_mask=torch.tensor([[1] * 100 + [0] * 50])
        ).last_hidden_state[0]
        states = encoder(make(tmp_path)).encode(batch).split(batch.lengths)
    for one, count in zip(states, seen, strict=True):
        assert (error(one, part) < 1e-5) == (count == 100)


def test_token_types(make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build("bert with other sizes", tmp_path)
    tokens, types = [ids(9), ids(4), ids(6)], [[0] * 4 + [1] * 3 + [2] * 2, None, [2] * 6]
    states = encoded(encoder(make(tmp_path)), tokens, types)
    for one, given, kinds in zip(states, tokens, types, strict=True):
        assert error(one, hidden_states(model, given, kinds)) < 1e-5
    assert error(states[0], hidden_states(model, tokens[0])) > 1e-3


@pytest.mark.parametrize(
    ("name", "changes"), FAULTS, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_what_is_read_wrongly_shows(
    name: str,
    changes: dict[str, Any],
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, parse = build(name, tmp_path), load.parse_config
    monkeypatch.setattr(load, "parse_config", lambda *parts: replace(parse(*parts), **changes))
    (states,) = encoded(encoder(make(tmp_path)), [ids(50)])
    assert error(states, hidden_states(model, ids(50))) > 1e-4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """As near to float32 as transformers' own half precision."""
    model = build("bert", tmp_path)
    expected = hidden_states(model, ids(50))
    theirs = hidden_states(model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]), ids(50)).float()
    (states,) = encoded(encoder(make(tmp_path, dtype=dtype)), [ids(50)])
    assert states.dtype != torch.float32
    assert excess(states, theirs, expected) < 1.5


def test_quantized_at_load(make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build("bert", tmp_path)
    (states,) = encoded(encoder(make(tmp_path, quant="int8_ch", activations="float")), [ids(50)])
    assert 1e-4 < error(states, hidden_states(model, ids(50))) < 5e-2


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "mish"}, "hidden_act"),
        ("bert", {"type_vocab_size": 5}, "token_type_embeddings"),
        ("distilbert", {"dim": None}, "entry 'dim' is missing"),
        ("distilbert", {"n_layers": 4}, "transformer.layer.3"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
    ],
)
def test_what_is_not_supported_is_named(
    name: str, changes: dict[str, Any], what: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    import json

    build(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises((ConfigError, CheckpointError), match=what):
        make(tmp_path)


def test_an_encoder_generates_nothing(
    make: Callable[..., LLM], shared: Callable[..., LLM], tmp_path: Path
) -> None:
    build("bert", tmp_path)
    llm = make(tmp_path)
    with pytest.raises(UsageError, match="call embed"):
        llm.generate([[1, 2]])
    with pytest.raises(UsageError, match=r"LLM\.embed"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(UsageError, match="task='embed'"):
        shared("docs-llama").embed([[1, 2]])
    for name, value in (("speculate", "ngram:4"), ("quant_head", "int8")):
        with pytest.raises(UsageError, match=name):
            make(tmp_path, **{name: value})
    with pytest.raises(UsageError, match="context_parallel"):
        make(tmp_path, tensor_parallel=2, context_parallel=True)
    llm.close()
