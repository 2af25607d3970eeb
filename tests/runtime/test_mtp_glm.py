"""Drafts of GLM-4.5's prediction layer, which has grouped-query attention and experts, are those of its definition, and change no id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.runtime.llm import LLM
from tests.runtime.family_cases import build, prompt
from tests.runtime.proofs import proves
from tests.runtime.test_mtp import GREEDY, LAYER, Definition, drafted, proposer_of, record, worst
from tests.runtime.test_speculation import content

PROMPTS = [prompt(length, 5 * length) for length in (9, 17, 40, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers whose last one is the prediction layer, with a random projection before it."""
    made: Path = tmp_path_factory.mktemp("glm")
    build("glm-4.5", made, num_hidden_layers=5, tie_word_embeddings=True)
    tensors, size = load_file(made / "model.safetensors"), 64
    generator = torch.Generator().manual_seed(0)
    parts = {name: tensors.pop(name) for name in [*tensors] if name.startswith(f"{LAYER}.")}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        parts[f"{LAYER}.{norm}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)
    parts[f"{LAYER}.eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    parts[f"{LAYER}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    files = {"model-00001.safetensors": tensors, "mtp.safetensors": parts}
    for name, part in files.items():
        save_file(part, made / name, metadata={"format": "pt"})
    (made / "model.safetensors").unlink()
    index = {tensor: name for name, part in files.items() for tensor in part}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((made / "config.json").read_text())
    changes = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    (made / "config.json").write_text(json.dumps(config | changes))
    return made


@proves("drafts", "mtp", "Glm4MoeForCausalLM")
def test_drafts_are_those_of_the_definition(make: Callable[..., LLM], folder: Path) -> None:
    definition = Definition(folder)
    plain = make(folder).generate(PROMPTS, GREEDY)
    for wrong_norm in (False, True):
        llm = make(folder, speculate=drafted())
        calls = record(llm)
        if wrong_norm:  # the planted fault
            layer = proposer_of(llm)._model
            layer.token_norm, layer.hidden_norm = layer.hidden_norm, layer.token_norm  # type: ignore[attr-defined]
        done = llm.generate(PROMPTS, GREEDY)
        assert content(done) == content(plain)
        difference, wrong = worst(calls, definition)
        assert len(calls) > 30
        if wrong_norm:
            assert difference > 1e-3
        else:
            assert difference < 1e-4 and wrong == 0
