"""Every architecture compared with transformers: small random models, plain, quantized, and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.runtime.errors import ConfigError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import parse_config
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.gguf_files import finish, new_writer
from tests.runtime.proofs import GREEDY, proves

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe every second": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}

ARCHITECTURES = {name: f"{family}ForCausalLM" for name, (family, _) in MODELS.items()}


def build(name: str, folder: Path, **more: Any) -> Any:
    """Saves a random model of transformers with biases and norms that differ from their initial values."""
    import transformers

    family, extra = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **extra, **more})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


IDS = [(7 * i * i + 3) % 300 for i in range(40)]


@proves("logits and ids", GREEDY, ARCHITECTURES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_ids(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, tmp_path)
    llm = make(tmp_path)
    expected = oracle.logits(model, IDS)
    assert float((window_logits(llm.engine, IDS) - expected).abs().max() / expected.abs().max()) < 1e-4
    from gristmill.runtime.sampling_params import SamplingParams

    with torch.no_grad():
        answer = model.generate(torch.tensor([IDS]), max_new_tokens=8, do_sample=False, pad_token_id=2)[
            0, len(IDS) :
        ]
    ids = llm.generate([IDS], SamplingParams(max_tokens=8, temperature=0))[0].token_ids
    assert list(ids) == [i for i in answer.tolist() if i != 1][: len(ids)]


@proves("quantized", "compressed-tensors", ARCHITECTURES)
@proves("quantized", "int4 at load", ARCHITECTURES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe", "mixtral"])
def test_a_quantized_directory(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    from gristmill.kernel_registry.scheme import QuantScheme
    from gristmill.quant.writing.checkpoint import write_quantized
    from gristmill.runtime.loader.config import load_config
    from gristmill.runtime.models import model_table

    build(name, tmp_path / "plain")
    table = model_table(load_config(tmp_path / "plain"))
    write_quantized(
        tmp_path / "plain", tmp_path / "out", table, QuantScheme.parse("int4_g32"), form="compressed-tensors"
    )
    stored, rounded = make(tmp_path / "out"), make(tmp_path / "plain", quant="int4_g32")
    assert torch.equal(window_logits(stored.engine, IDS), window_logits(rounded.engine, IDS))


@proves("quantized", "mxfp4", "GptOssForCausalLM")
def test_gpt_oss_in_mxfp4(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Experts as OpenAI stores them: blocks and scales, gate and up rows interleaved; expected values by
    transformers."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from gristmill.quant import quantize

    model = build("gpt-oss", tmp_path / "plain")
    out = tmp_path / "out"
    out.mkdir()
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    state = model.state_dict()
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        q = quantize(tensors.pop(name).transpose(1, 2).contiguous(), "mxfp4")
        blocks = q.codes.unflatten(-1, (-1, 16))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": q.scales}
        state[name].copy_(convert_moe_packed_tensors(blocks, q.scales, dtype=torch.float32))
    save_file(
        {n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    (out / "config.json").write_text(json.dumps(config))
    expected = oracle.logits(model, IDS)
    for more in ({}, {"quant": "fp32"}):
        actual = window_logits(make(out, **more).engine, IDS)
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4


@proves("GGUF", "qwen2", "Qwen2ForCausalLM")
@proves("GGUF", "qwen3", "Qwen3ForCausalLM")
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_gguf_file(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = build(name, tmp_path / "plain")
    config, path = model.config, tmp_path / "m.gguf"
    writer, table = new_writer(path, name, config.to_dict())
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    raw = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            module, _, suffix = key.rpartition(".")
            tensor_name, data = f"{table.get_name(module)}.{suffix}", tensor.numpy()
            if "_proj" in key and data.ndim == 2:
                blocks = gguf.quants.quantize(data, raw)
                writer.add_tensor(tensor_name, blocks, raw_dtype=raw)
                tensor.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, raw)))
            else:
                writer.add_tensor(tensor_name, data)
    finish(writer)
    expected = oracle.logits(model, IDS)
    assert (
        float(
            (window_logits(make(path, activations="float").engine, IDS) - expected).abs().max()
            / expected.abs().max()
        )
        < 1e-4
    )


def test_what_a_configuration_says() -> None:
    base = {
        **SMALL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    assert [parse_config(base).is_moe_layer(i) for i in range(3)] == [False, False, False]
    assert [parse_config(base | {"mlp_only_layers": []}).is_moe_layer(i) for i in range(3)] == [
        False,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="num_experts_per_tok = 5 is more than the 4 experts"):
        parse_config(base | {"num_experts_per_tok": 5})
    qwen2 = {**SMALL, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert parse_config(qwen2).qkv_bias
    with pytest.raises(ConfigError, match="no sliding window, got sliding_window = 32"):
        parse_config(qwen2 | {"use_sliding_window": True})


@pytest.mark.parametrize("fault", ["sinks", "window", "bias of gate and up", "bias of down", "clamp"])
def test_what_is_left_out_of_gpt_oss_shows(fault: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Planted faults, each in one layer."""
    model = build("gpt-oss", tmp_path)
    llm, expected = make(tmp_path), oracle.logits(model, IDS)
    layer = llm.model.layers[2]  # type: ignore[attr-defined]
    if fault == "bias of gate and up":
        layer.mlp.gate_up_bias.copy_(layer.mlp.gate_up_bias.flip(0))
    elif fault == "bias of down":
        layer.mlp.down_bias.zero_()
    elif fault == "clamp":
        assert (layer.mlp.alpha, layer.mlp.limit) == (1.702, 7.0)
        layer.mlp.limit = 0.5
    elif fault == "sinks":
        layer.attention.sinks.fill_(-1e30)
    else:  # like the next layer, which has no window
        other = llm.model.layers[1].attention  # type: ignore[attr-defined]
        assert (layer.attention.window, other.window) == (16, 0)
        layer.attention.window, layer.attention.attend = 0, other.attend
    assert float((window_logits(llm.engine, IDS) - expected).abs().max() / expected.abs().max()) > 1e-2


def test_a_norm_left_out_shows(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Planted fault: the head norms of one layer are missing."""
    model = build("qwen3", tmp_path)
    llm, expected = make(tmp_path), oracle.logits(model, IDS)
    attention, plans = llm.model.layers[1].attention, llm.model.plans  # type: ignore[attr-defined]
    attention.q_norm = attention.k_norm = None
    attention.write = plans.bind_packed(attention.write.static.with_values(norm=False))
    assert float((window_logits(llm.engine, IDS) - expected).abs().max() / expected.abs().max()) > 1e-2
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
