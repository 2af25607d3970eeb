"""GGUF files of each family, with the names, the order of rows and the keys that llama.cpp's converter writes: the logits are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gristmill.quant.formats import gguf as gguf_format
from gristmill.quant.formats.contract import Tensors
from gristmill.quant.formats.gguf_blocks import read_blocks
from gristmill.quant.formats.gguf_header import GgufHeader
from gristmill.quant.formats.mxfp4 import Mxfp4
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import CheckpointError, ConfigError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader import load
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.models import llama4
from gristmill.tools.evaluate import window_logits
from tests.runtime import family_gguf, oracle
from tests.runtime.family_cases import ARCHITECTURES, build, prompt
from tests.runtime.family_gguf import CHANGES, FILES, write
from tests.runtime.proofs import proves

gguf = pytest.importorskip("gguf")


@proves("GGUF", "phi3", "Phi3ForCausalLM")
@proves("GGUF", "glm4", "Glm4ForCausalLM")
@proves("GGUF", "glm4moe with experts", "Glm4MoeForCausalLM")
@proves("GGUF", "olmo2", {name: ARCHITECTURES[name] for name in ("olmo-2", "olmo-3")})
@proves("GGUF", "granite", "GraniteForCausalLM")
@proves("GGUF", "granitemoe with experts", {n: ARCHITECTURES[n] for n in FILES if "granite-moe" in n})
@proves("GGUF", "command-r", "CohereForCausalLM")
@proves("GGUF", "cohere2", "Cohere2ForCausalLM")
@proves("GGUF", "minimax-m2 with experts", "MiniMaxM2ForCausalLM")
@proves(
    "GGUF",
    "deepseek2 with experts",
    {n: ARCHITECTURES[n] for n in ("deepseek-v2", "deepseek-v2-lite", "kimi-k2")},
)
@proves("GGUF", "chatglm", "GlmForCausalLM")
@proves("GGUF", "qwen2moe with experts", "Qwen2MoeForCausalLM")
@proves("GGUF", "gpt-oss with experts", "GptOssForCausalLM")
@proves("GGUF", "llama4 with experts", "Llama4ForCausalLM")
@proves("GGUF", "mistral3", {name: ARCHITECTURES[name] for name in ("ministral-3", "mistral")})
@proves("GGUF", "afmoe with experts", "AfmoeForCausalLM")
@proves("GGUF", "gemma4", {name: ARCHITECTURES[name] for name in ("gemma-4-e2b", "gemma-4-31b")})
@proves("GGUF", "gemma4 with experts", {"gemma-4-26b-a4b": ARCHITECTURES["gemma-4-26b-a4b"]})
@pytest.mark.parametrize("name", FILES)
def test_logits(name: str, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "llama-4":  # whose files do not have what is the same in all its models
        assert llama4.SPAN == 8192
        monkeypatch.setattr(llama4, "SPAN", 64)
    model, ids = build(name, tmp_path / "plain", **CHANGES.get(name, {})), prompt(100)
    write(name, tmp_path / "plain", tmp_path / "m.gguf")
    llm = make(tmp_path / "m.gguf", activations="float")
    assert llm.config.architecture == ARCHITECTURES[name].replace("MistralFor", "Ministral3For")
    assert error(llm, model, ids) < 1e-4


def error(llm: LLM, model: Any, ids: list[int]) -> float:
    return oracle.error(window_logits(llm.engine, ids), oracle.logits(model, ids))


def test_quantized_halves_of_a_latent_projection(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Of DeepSeek's latents, keys are stored transposed, and both halves may be quantized: one matrix in floats here."""
    model, ids = (
        build("kimi-k2", tmp_path / "plain", qk_nope_head_dim=32, v_head_dim=32, q_lora_rank=64),
        prompt(100),
    )
    read = write("kimi-k2", tmp_path / "plain", tmp_path / "m.gguf", quantized="_b_proj.weight")
    llm = make(tmp_path / "m.gguf", activations="float")
    assert error(llm, model, ids) > 1e-4  # of rounding
    state = model.state_dict()
    for key, value in read.items():
        if ".k_b_proj" in key:
            both = (value.transpose(1, 2), read[key.replace(".k_b", ".v_b")])
            state[key.replace(".k_b", ".kv_b")].copy_(torch.cat(both, 1).flatten(0, 1))
        elif ".q_b_proj" in key:
            state[key].copy_(value)
    assert len(read) == 3 * 4 and error(llm, model, ids) < 1e-4


def test_one_tensor_of_q_k_and_v(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of GLM-4 in the layout of its own code, of which the converter keeps attention as it is."""
    model, apart = build("glm-4", tmp_path / "plain"), family_gguf.tensors

    def fused(*given: Any) -> dict[str, Tensor]:
        found = apart(*given)
        for key in [key for key in found if ".q_proj." in key]:
            parts = [found.pop(key.replace(".q_proj", f".{part}_proj")) for part in "qkv"]
            found[key.replace(".q_proj", ".qkv_proj")] = torch.cat(parts)
        return found

    monkeypatch.setattr(family_gguf, "tensors", fused)
    write("glm-4", tmp_path / "plain", tmp_path / "m.gguf")
    assert error(make(tmp_path / "m.gguf", activations="float"), model, prompt(100)) < 1e-4


def test_a_matrix_of_one_row(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier converters left out axes of one."""
    model, whole = build("qwen2-moe", tmp_path / "plain", **CHANGES["qwen2-moe"]), family_gguf.tensors
    monkeypatch.setattr(
        family_gguf, "tensors", lambda *given: {k: v.squeeze(0) for k, v in whole(*given).items()}
    )
    write("qwen2-moe", tmp_path / "plain", tmp_path / "m.gguf")
    stored = {each.name: each.shape for each in GgufHeader(tmp_path / "m.gguf").tensors}
    assert stored["blk.0.ffn_gate_inp_shexp.weight"] == (64,)
    assert error(make(tmp_path / "m.gguf", activations="float"), model, prompt(100)) < 1e-4


def test_experts_in_mxfp4(make: Callable[..., LLM], tmp_path: Path) -> None:
    """The logits are those of the values in the file."""
    model, ids = build("gpt-oss", tmp_path / "plain", **CHANGES["gpt-oss"]), prompt(100)
    read = write("gpt-oss", tmp_path / "plain", tmp_path / "m.gguf", quantized=".experts.", kind="MXFP4")
    llm = make(tmp_path / "m.gguf", activations="float")
    assert error(llm, model, ids) > 1e-3  # of rounding
    state = model.state_dict()
    for key, value in read.items():
        of_model = state[
            f"{key.partition('.experts.')[0]}.experts.{'down' if 'down' in key else 'gate_up'}_proj"
        ]
        rows = slice(None) if "down" in key else slice(int("up_proj" in key), None, 2)
        of_model[..., rows].copy_(value.transpose(1, 2))
    assert len(read) == 3 * 4 and error(llm, model, ids) < 1e-4


@pytest.mark.parametrize(
    ("name", "part", "count"),
    [
        ("gemma-4-26b-a4b", ".experts.", 8),
        ("gemma-4-e2b", "embed_tokens_per_layer", 1),
        ("gemma-4-e2b", "per_layer_input_gate", 6),
    ],
)
def test_quantized_parts_of_gemma_4(
    name: str, part: str, count: int, make: Callable[..., LLM], tmp_path: Path
) -> None:
    """Experts whose gate and up are one tensor, and the vectors of layers: the logits are those of the values in the file."""
    model, ids = build(name, tmp_path / "plain"), prompt(100)
    read = write(name, tmp_path / "plain", tmp_path / "m.gguf", quantized=part)
    llm = make(tmp_path / "m.gguf", activations="float")
    assert error(llm, model, ids) > 1e-3  # of rounding
    state = model.state_dict()
    for key, value in read.items():
        state[key.removesuffix(".weight") if ".experts." in key else key].copy_(value)
    assert len(read) == count and error(llm, model, ids) < 1e-4


def test_blocks_of_gpt_oss_are_read_exactly(tmp_path: Path) -> None:
    """Every code and scale of OpenAI's blocks, of which the low nibble is the even one, through the converter's order: the halves of a block."""
    rng, (count, rows, blocks) = np.random.default_rng(3), (4, 8, 3)
    codes = rng.integers(0, 16, (count, rows, blocks, 32), dtype=np.uint8)
    scales = np.arange(count * rows * blocks, dtype=np.uint8).reshape(count, rows, blocks) * 2 + 20
    theirs = {
        "m.experts.down_proj_blocks": torch.tensor(codes[..., ::2] | codes[..., 1::2] << 4),
        "m.experts.down_proj_scales": torch.tensor(scales),
    }
    stored = Mxfp4({}).read(Tensors(theirs), "m.experts.down_proj", (count, rows, 32 * blocks))
    own = np.concatenate((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), -1)
    read = read_blocks("m", "MXFP4", torch.tensor(own).flatten(-2), (count, rows, 32 * blocks))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    exact = torch.tensor(values[codes] * 2.0 ** (scales[..., None].astype(np.float64) - 127)).flatten(-2)
    assert stored is not None and torch.equal(stored.weight.dequantize().double(), exact)
    assert torch.equal(read.dequantize().double(), exact)
    assert torch.equal(read.codes, stored.weight.codes)


LEFT_OUT = {
    "temperature": ("ministral-3", "add_attn_temperature_scale"),
    "mscale": ("ministral-3", "add_rope_scaling_yarn_log_mul"),
    "slow turns": ("ministral-3", "add_rope_scaling_yarn_beta_fast"),
    "scale of experts": ("afmoe", "add_expert_weights_scale"),
    "soft cap of logits": ("gemma-4-e2b", "add_final_logit_softcapping"),
}
"""Keys whose absence another model is."""


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_keys_count(
    fault: str, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, method = LEFT_OUT[fault]
    changes = CHANGES.get(name, {})
    if fault == "slow turns":
        changes = {"rope_parameters": {**changes["rope_parameters"], "beta_fast": 4.0}}
    model, ids = build(name, tmp_path / "plain", **changes), prompt(100)
    write(name, tmp_path / "plain", tmp_path / "m.gguf")
    assert error(make(tmp_path / "m.gguf", activations="float"), model, ids) < 1e-4
    monkeypatch.setattr(gguf.GGUFWriter, method, lambda *given: None)
    write(name, tmp_path / "plain", tmp_path / "less.gguf")
    assert error(make(tmp_path / "less.gguf", activations="float"), model, ids) > 1e-3


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("llama-4", "llama4.attention.sliding_window", 0, "sliding_window = 0, a model without chunks"),
        ("ministral-3", "mistral3.rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor must be 1, got 0.5"),
        ("gemma-4-e2b", "gemma4.attention.sliding_window_pattern", [True, False], "each of 6 layers, got 2"),
        ("gemma-4-31b", "gemma4.attention.head_count_kv", [4, 1], "each of 7 layers, got 2"),
        ("gemma-4-e2b", "gemma4.attention.shared_kv_layers", "a", "'attention.shared_kv_layers' must be int"),
        ("glm-4.5", "glm4moe.nextn_predict_layers", "a", "'nextn_predict_layers' must be int, got 'a'"),
        ("deepseek-v2", "deepseek2.expert_group_count", "a", "'expert_group_count' must be int, got 'a'"),
        ("kimi-k2", "deepseek2.rope.dimension_count", [1, 2], "'rope.dimension_count' must be int"),
        ("kimi-k2", "deepseek2.attention.key_length_mla", "a", "'attention.key_length_mla' must be int"),
    ],
)
def test_keys_that_are_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(name, tmp_path / "plain", **CHANGES.get(name, {}))
    usual = family_gguf.keys

    def more(writer: Any, *given: Any) -> None:
        usual(writer, *given)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    monkeypatch.setattr(family_gguf, "keys", more)
    write(name, tmp_path / "plain", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("fault", ["order of rows", "factors", "longrope", "range of yarn", "experts"])
def test_faults_show(
    fault: str, make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"longrope": "phi-4-mini", "range of yarn": "gpt-oss", "experts": "gpt-oss"}.get(fault, "granite")
    model, ids = build(name, tmp_path / "plain", **CHANGES.get(name, {})), prompt(100)
    if fault == "order of rows":
        monkeypatch.setattr(family_gguf, "pairs", lambda rows, heads: rows)
    elif fault == "range of yarn":  # in whole dimensions
        parse = load.parse_config

        def whole(*parts: Any) -> ModelConfig:
            read = parse(*parts)
            return replace(read, rope=replace(read.rope, truncate=True))

        monkeypatch.setattr(load, "parse_config", whole)
    elif fault == "experts":  # biases of gate and up exchanged
        right = family_gguf.tensors

        def exchanged(*given: Any) -> dict[str, Tensor]:
            found = right(*given)
            other = {"gate_proj.bias": "up_proj.bias", "up_proj.bias": "gate_proj.bias"}
            ends = {key: next((end for end in other if key.endswith(f"experts.{end}")), "") for key in found}
            return {key.removesuffix(end) + other.get(end, ""): found[key] for key, end in ends.items()}

        monkeypatch.setattr(family_gguf, "tensors", exchanged)
    elif fault == "factors":
        monkeypatch.delitem(family_gguf.KEYS, "embedding_multiplier")
    else:
        monkeypatch.setattr(
            gguf_format,
            "LONG_FACTORS",
            {"rope_factors_long.weight": "short_factor"} | {"rope_factors_short.weight": "long_factor"},
        )
    write(name, tmp_path / "plain", tmp_path / "m.gguf")
    assert error(make(tmp_path / "m.gguf", activations="float"), model, ids) > 1e-3


def test_other_frequencies_of_gemma_4_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pairs that turn as they are, and after them pairs that do not."""
    build("gemma-4-e2b", tmp_path / "plain")
    write_tensor = gguf.GGUFWriter.add_tensor

    def other(self: Any, name: str, data: Any, *given: Any, **named: Any) -> None:
        write_tensor(self, name, data[::-1].copy() if name == "rope_freqs.weight" else data, *given, **named)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", other)
    write("gemma-4-e2b", tmp_path / "plain", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight must be 1 for the first pairs"):
        load_config(tmp_path / "m.gguf")


def test_a_half_without_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("kimi-k2", tmp_path / "plain")
    both = family_gguf.tensors
    monkeypatch.setattr(
        family_gguf,
        "tensors",
        lambda *given: {
            key: value for key, value in both(*given).items() if "layers.1.self_attn.v_b" not in key
        },
    )
    write("kimi-k2", tmp_path / "plain", tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k_b\.weight must be \[heads, rank, N\] beside"):
        load_config(tmp_path / "m.gguf")
