"""Mistral's own directories: params.json and consolidated.safetensors, with q and k for a rotation of neighbouring pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from gristmill.quant.checkpoints.checkpoint import NoTokenizerError
from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader import load
from gristmill.runtime.loader.config import load_config, open_checkpoint
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.cli import cli
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.family_cases import build, prompt
from tests.runtime.proofs import proves

NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe.": "feed_forward.",
}


def write(
    model: Any, folder: Path, shards: int = 1, stored: Mapping[str, torch.Tensor] | None = None, **params: Any
) -> Path:
    """Writes a model of transformers as Mistral does; `stored` has its tensors where they are not those in memory."""
    c, tensors = model.config, dict[str, torch.Tensor]()
    for key, value in (stored or model.state_dict()).items():
        name, _, suffix = key.rpartition(".")
        for theirs, own in NAMES.items():
            name = own if name == theirs else name.replace(f".{theirs}", f".{own}")
        if name.endswith(("wq", "wk")) and suffix == "weight":
            # Halves of a head become pairs.
            width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
            value = value.view(-1, 2, width // 2, c.hidden_size).transpose(1, 2).reshape(value.shape)
        tensors[f"{name.removeprefix('model.')}.{suffix}"] = value.contiguous()
    folder.mkdir()
    for shard in range(shards):
        stem = "consolidated" if shards == 1 else f"consolidated-{shard + 1:05}-of-{shards:05}"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / f"{stem}.safetensors")
    own = {
        "dim": c.hidden_size,
        "n_layers": c.num_hidden_layers,
        "head_dim": getattr(c, "head_dim", None),
        "hidden_dim": c.intermediate_size,
        "n_heads": c.num_attention_heads,
        "n_kv_heads": c.num_key_value_heads,
        "rope_theta": c.rope_parameters["rope_theta"],
        "norm_eps": c.rms_norm_eps,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
    }
    (folder / "params.json").write_text(json.dumps(own | params))
    return folder


@pytest.mark.parametrize(
    ("name", "shards", "params"),
    [
        ("mistral with a window", 1, {"sliding_window": 24}),
        (
            "ministral-3",
            3,
            {
                "yarn": {"factor": 4.0, "original_max_position_embeddings": 60, "beta": 32, "alpha": 1},
                "llama_4_scaling": {"beta": 0.4, "original_max_position_embeddings": 60},
            },
        ),
    ],
)
@proves("quantized", "params.json", "MistralForCausalLM")
def test_logits(
    name: str,
    shards: int,
    params: dict[str, Any],
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: dict[str, Any] = {"head_dim": 32}
    if shards > 1:
        rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 60}
        changes["rope_parameters"] = {**rope, "llama_4_scaling_beta": 0.4}
    model, ids = build(name, tmp_path / "plain", **changes), prompt(100)
    folder = write(model, tmp_path / "native", shards, **params)
    expected = oracle.logits(model, ids)
    llm = make(folder)
    assert float((window_logits(llm.engine, ids) - expected).abs().max() / expected.abs().max()) < 1e-4
    assert llm.config.eos_ids == (2,)
    assert set(open_checkpoint(folder)) == set(model.state_dict())
    # Planted fault: rows read in the order of Hugging Face.
    parse = load.parse_config
    monkeypatch.setattr(load, "parse_config", lambda *parts: replace(parse(*parts), rope_interleaved=False))
    assert (
        float((window_logits(make(folder).engine, ids) - expected).abs().max() / expected.abs().max()) > 1e-3
    )


def test_prompts_are_ids(make: Callable[..., LLM], tmp_path: Path) -> None:
    folder = write(build("mistral", tmp_path / "plain"), tmp_path / "native")
    llm = make(folder)
    assert len(llm.generate([prompt(9)], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(
        NoTokenizerError, match=r"no tokenizer\.json and no tekken\.json: pass prompts as lists"
    ):
        open_checkpoint(folder).tokenizer()
    with pytest.raises(UsageError, match=r"no tekken\.json"):
        llm.generate("The")


def test_what_is_written(tmp_path: Path) -> None:
    """Quantized directories have the layout of Hugging Face, and are written from it."""
    folder = write(build("mistral", tmp_path / "plain"), tmp_path / "native")
    arguments = ["quantize", "--model", str(folder), "--quant", "int4_g32", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and "is not in the layout of a text model of Hugging Face" in result.output


def in_fp8(stored: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(What Mistral stores, with a scale for each matrix of a layer; the values of that)."""
    codes, values = dict(stored), dict(stored)
    for key, value in stored.items():
        if value.ndim == 2 and ".layers." in key and not key.endswith("moe.gate.weight"):
            scale = value.abs().max() / 448
            codes[key] = (value / scale).to(torch.float8_e4m3fn)
            values[key] = codes[key].float() * scale
            stem = key.removesuffix("weight")
            codes |= {f"{stem}qscale_weight": scale, f"{stem}qscale_act": torch.tensor(0.03)}
    return codes, values


MOE = {"num_experts": 4, "num_experts_per_tok": 2}


@proves("quantized", "params.json", {"mixtral": "MixtralForCausalLM"})
@proves("quantized", "params.json in fp8", {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"})
@pytest.mark.parametrize("name", ["mistral", "mixtral"])
@pytest.mark.parametrize("activations", ["TENSOR", "NO_SCALES"])
def test_fp8_and_experts(name: str, activations: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    plain, params = tmp_path / "plain", {"moe": MOE} if name == "mixtral" else {}
    model, ids = build(name, plain), prompt(100)
    stored = load_file(plain / "model.safetensors")
    folder = write(model, tmp_path / "native", 2, stored, **params)
    assert error(make(folder), oracle.logits(model, ids), ids) < 1e-4
    assert set(open_checkpoint(folder)) == set(stored)
    codes, values = in_fp8(stored)
    if activations == "NO_SCALES":
        codes = {key: value for key, value in codes.items() if not key.endswith("qscale_act")}
    params |= {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": activations}}
    quantized = write(model, tmp_path / "fp8", stored=codes, **params)
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    expected = oracle.logits(oracle.load(plain), ids)
    llm = make(quantized, activations="float")
    assert error(llm, expected, ids) < 1e-4 < error(make(folder), expected, ids)
    # Planted fault: a scale that is read as a divisor.
    module = "model.layers.1.self_attn.o_proj"
    codes[f"{module}.qscale_weight"] = 1 / codes[f"{module}.qscale_weight"]
    wrong = write(model, tmp_path / "wrong", stored=codes, **params)
    assert error(make(wrong, activations="float"), expected, ids) > 1e-3


def error(llm: LLM, expected: torch.Tensor, ids: list[int]) -> float:
    return float((window_logits(llm.engine, ids) - expected).abs().max() / expected.abs().max())


def test_windows_of_some_layers(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Ministral 8B lists those of its first layers, which are repeated."""
    model, ids = build("ministral", tmp_path / "plain"), prompt(100)
    expected = oracle.logits(model, ids)
    assert error(make(write(model, tmp_path / "native", sliding_window=[24, None])), expected, ids) < 1e-4
    assert error(make(write(model, tmp_path / "other", sliding_window=[None, 24])), expected, ids) > 1e-3
    for window in ([24, 48], [24, None, None]):
        with pytest.raises(ConfigError, match="sliding_window must have one size or null for each of some"):
            load_config(write(model, tmp_path / str(len(window)), sliding_window=window))


def test_images_are_left_out(make: Callable[..., LLM], tmp_path: Path) -> None:
    model, ids = build("mistral", tmp_path / "plain"), prompt(50)
    stored = {
        **model.state_dict(),
        "vision_encoder.ln_pre.weight": torch.ones(3),
        "patch_merger.w.weight": torch.ones(2),
    }
    folder = write(model, tmp_path / "native", stored=stored, vision_encoder={"hidden_size": 3})
    assert error(make(folder), oracle.logits(model, ids), ids) < 1e-4


def test_what_is_not_read(tmp_path: Path) -> None:
    model = build("mistral", tmp_path / "plain")
    for entry in ("multimodal", "q_lora_rank"):
        folder = write(model, tmp_path / entry, **{entry: {"x": 1}})
        with pytest.raises(ConfigError, match=rf"params\.json: {entry} is not read in this layout"):
            load_config(folder)
    refused = {
        "quantization": [
            (
                {"qformat_weight": "int4"},
                r"quantization {'qformat_weight': 'int4'} is not read in this layout; known",
            ),
            (
                {"qformat_weight": "fp8_e4m3", "qscheme_act": "CHANNEL"},
                r"'CHANNEL'} is not read in this layout",
            ),
        ],
        "moe": [
            (
                {**MOE, "num_shared_experts": 1, "routed_scale": None},
                "moe: num_shared_experts = 1: of experts, only Mix",
            ),
            ({"num_experts": 4}, "moe: entry 'num_experts_per_tok' is missing"),
        ],
    }
    for entry, cases in refused.items():
        for number, (value, message) in enumerate(cases):
            folder = write(model, tmp_path / f"{entry}{number}", **{entry: value})
            with pytest.raises(ConfigError, match=message):
                load_config(folder)
    folder = write(model, tmp_path / "other")
    save_file({"layers.0.attention.wz.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor layers\.0\.attention\.wz\.weight is not read"):
        load_config(folder)
    # With the files of Hugging Face beside them, those count.
    for file in (tmp_path / "plain").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert load_config(folder).rope_interleaved is False
