"""Models that the comparisons of engines make: stored formats, tensors and layers, and that gristmill loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from gristmill import LLM, SamplingParams
from lab import engine, engine_turns

SMALL: dict[str, dict[str, Any]] = {
    "llama3-8b": {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 256},
    "qwen3-8b": {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 384},
    "mixtral-8x7b": {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 256},
    "gpt-oss-20b": {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 8, "intermediate_size": 96},
    "qwen3-30b-a3b": {
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 4,
        "moe_intermediate_size": 32,
        "num_experts": 8,
    },
}
"""Sizes in place of those of `SHAPES`. Those in FP8 have whole blocks in q, k and v, which vLLM needs to fuse them."""
OPTIONS = {
    "llama3-8b": "--quant fp8_block --format fp8 --layers 3",
    "qwen3-8b": "--quant fp8_block --format fp8 --layers 5",
    "mixtral-8x7b": "--quant int4_g128 --layers 4",
    "gpt-oss-20b": "--quant mxfp4 --format mxfp4 --layers 6",
    "qwen3-30b-a3b": "--layers 4",
}


def made(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """A small model with two layers that are no copies, and its config.json."""
    small = engine.SHAPES[name] | SMALL[name] | {"vocab_size": 512, "num_key_value_heads": 2}
    monkeypatch.setitem(engine.SHAPES, name, small)
    line = ["--model", name, *OPTIONS[name].split(), "--distinct", "2", "--out", "-"]
    given = engine_turns.arguments(line)
    model = engine_turns.made(given.model, folder, given.quant, given.format, given.distinct, given.layers)
    return model, json.loads((model / "config.json").read_text())


def tensors(model: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor of a directory with one file."""
    with safe_open(model / "model.safetensors", "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - safetensors' own
        return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_made_model_generates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = made(name, tmp_path, monkeypatch)
    layers = {key.split(".")[2] for key in tensors(model) if key.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"] == int(OPTIONS[name].split()[-1])
    assert len(config.get("layer_types", layers)) == len(layers)
    llm = LLM(model, device="cpu", max_seqs=2, max_batch_tokens=64, max_model_len=64, num_blocks=16)
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    llm.close()
    assert len(result.token_ids) == 4


def test_experts_of_gpt_oss_are_stored_as_its_own_checkpoints_store_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 32 along the inputs, in experts alone; the window is that of every second layer."""
    model, config = made("gpt-oss-20b", tmp_path, monkeypatch)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 3
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    stored, experts = tensors(model), "model.layers.5.mlp.experts"
    assert {key: kind for key, kind in stored.items() if key.startswith(experts)} == {
        f"{experts}.gate_up_proj_blocks": ("U8", [32, 192, 2, 16]),
        f"{experts}.gate_up_proj_scales": ("U8", [32, 192, 2]),
        f"{experts}.gate_up_proj_bias": ("BF16", [32, 192]),
        f"{experts}.down_proj_blocks": ("U8", [32, 64, 3, 16]),
        f"{experts}.down_proj_scales": ("U8", [32, 64, 3]),
        f"{experts}.down_proj_bias": ("BF16", [32, 64]),
    }
    assert stored["model.layers.5.self_attn.q_proj.weight"] == ("BF16", [128, 64])
    assert stored["model.layers.5.self_attn.sinks"] == ("BF16", [8])


def test_experts_in_four_bits_are_stored_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight codes per word, with a scale for each 128 inputs; routers stay in floats, those of copied layers included."""
    model, config = made("mixtral-8x7b", tmp_path, monkeypatch)
    stored, moe = tensors(model), "model.layers.3.block_sparse_moe"
    for matrix in ("w1", "w2", "w3"):
        assert stored[f"{moe}.experts.7.{matrix}.weight_packed"] == ("I32", [256, 32])
        assert stored[f"{moe}.experts.7.{matrix}.weight_scale"] == ("BF16", [256, 2])
    assert stored[f"{moe}.gate.weight"] == ("BF16", [8, 256])
    assert {f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(4)} < {
        *config["quantization_config"]["ignore"]
    }


def test_dense_layers_in_fp8_have_a_scale_for_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = made("qwen3-8b", tmp_path, monkeypatch)
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    stored, down = tensors(model), "model.layers.4.mlp.down_proj"
    assert stored[f"{down}.weight"] == ("F8_E4M3", [256, 384])
    assert stored[f"{down}.weight_scale_inv"] == ("F32", [2, 3])
    assert stored["lm_head.weight"] == ("BF16", [512, 256])
