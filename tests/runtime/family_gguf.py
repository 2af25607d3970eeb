"""The GGUF file of each family's case, as llama.cpp's converter writes it: keys, names, and the order of rows."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.family_cases import THETA, YARN
from tests.runtime.gguf_files import finish, new_writer

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi-3": ("phi3", {"sliding_window": 40}, {}),
    "phi-4-mini": ("phi3", {}, {"rope_dimension_count": 12}),
    "glm-4-0414": ("glm4", {}, {"rope_dimension_count": 12}),
    "glm-4.5": ("glm4moe", {}, {"rope_dimension_count": 12}),
    "glm-4.5-air": ("glm4moe", {}, {"rope_dimension_count": 8}),
    "olmo-2": ("olmo2", {}, {}),
    "olmo-3": ("olmo2", {"sliding_window": 24}, {}),
    "granite": ("granite", {}, {}),
    "granite-moe": ("granitemoe", {}, {}),
    "granite-moe with a shared expert": ("granitemoe", {}, {}),
    "command-r": ("command-r", {}, {}),
    "command-r+": ("command-r", {}, {}),
    "command-a": ("cohere2", {"sliding_window": 24}, {"rope_dimension_count": 16}),
    "minimax-m2": ("minimax-m2", {}, {"rope_dimension_count": 16}),
    "deepseek-v2": ("deepseek2", {}, {"rope_dimension_count": 16}),
    "deepseek-v2-lite": ("deepseek2", {}, {"rope_dimension_count": 16}),
    "kimi-k2": ("deepseek2", {}, {"rope_dimension_count": 16, "rope_scaling_type": "none"}),
    "glm-4": ("chatglm", {}, {"rope_dimension_count": 8}),
    "qwen2-moe": ("qwen2moe", {}, {}),
    "gpt-oss": ("gpt-oss", {"sliding_window": 24}, {}),
    "llama-4": ("llama4", {}, {"rope_dimension_count": 16}),
    "ministral-3": ("mistral3", {}, {"rope_dimension_count": 128}),
    "mistral": ("mistral3", {}, {"rope_dimension_count": 16}),
    "afmoe": ("afmoe", {"sliding_window": 24}, {"rope_dimension_count": 32}),
    "gemma-4-e2b": ("gemma4", {"sliding_window": 24}, {"rope_dimension_count": 32}),
    "gemma-4-31b": ("gemma4", {"sliding_window": 24}, {"rope_dimension_count": 32}),
    "gemma-4-26b-a4b": ("gemma4", {"sliding_window": 24}, {"rope_dimension_count": 32}),
}
"""Case -> ggml's architecture, entries of the configuration that the converter writes by `add_NAME`, and values that it computes."""
KEYS = {
    "num_experts_per_tok": "expert_used_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "layer_norm_eps": "layer_norm_eps",
    "num_experts": "expert_count",
    "num_shared_experts": "expert_shared_count",
    "num_dense_layers": "leading_dense_block_count",
    "route_scale": "expert_weights_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
}
"""Entries of config.json -> keys of the file."""


def keys(writer: Any, name: str, config: dict[str, Any]) -> None:
    """Writes what the converter writes about a model."""
    import gguf

    architecture, entries, values = FILES[name]
    written = {KEYS[entry]: config[entry] for entry in KEYS if config.get(entry) is not None}
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(rope, config["head_dim"]))
    written |= {"rope_freq_base": rope.get("rope_theta", 1e4)} | entries | values
    if name in ("kimi-k2", "minimax-m2", "afmoe") or name.startswith("glm-4.5"):
        written["expert_gating_func"] = gguf.ExpertGatingFuncType.SIGMOID
    if name in ("minimax-m2", "gpt-oss", "llama-4"):
        written["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "deepseek2":
        nope, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        written |= {"key_length": config["kv_lora_rank"] + rotated, "value_length": config["kv_lora_rank"]}
        written |= {"key_length_mla": nope + rotated, "value_length_mla": config["v_head_dim"]}
    if rope.get("rope_type") == "yarn":
        written |= {"rope_scaling_factor": rope["factor"], "rope_scaling_type": "yarn"}
        written["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
        if architecture == "olmo2":
            written["rope_scaling_attn_factors"] = rope["attention_factor"]
        else:
            for entry in ("attention_factor", "beta_fast", "beta_slow"):
                if rope.get(entry) is not None:
                    written[f"rope_scaling_yarn_{entry.replace('attention', 'attn')}"] = rope[entry]
    if name == "ministral-3":
        written["rope_scaling_yarn_log_mul"] = rope["mscale_all_dim"]
        written["attn_temperature_scale"] = rope["llama_4_scaling_beta"]
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        written |= {"rope_scaling_orig_ctx_len": original}
        if "long_factor" in rope:
            scale = config["max_position_embeddings"] / original
            written["rope_scaling_attn_factors"] = (1 + math.log(scale) / math.log(original)) ** 0.5
    if architecture == "gemma4":
        written |= gemma4(writer, config)
    kinds = {kind.value: kind for kind in gguf.RopeScalingType}
    for key, value in written.items():
        value = kinds.get(value, value) if key == "rope_scaling_type" else value
        getattr(writer, f"add_{key}")(value)


def gemma4(writer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What the converter writes about layers of Gemma 4, whose heads and widths differ."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    layers, readers = config["num_hidden_layers"], config["num_kv_shared_layers"]
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    full = next(iter(config["per_layer_config"].values()))
    width, wide = full["head_dim"], config["intermediate_size"]
    rotated, pairs = int(width * share / 2), width // 2
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32))
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([wide if i < layers - readers else 2 * wide for i in range(layers)])
    if "num_key_value_heads" in full:
        own, others = config["num_key_value_heads"], full["num_key_value_heads"]
        writer.add_head_count_kv([own if one else others for one in slides])
    values = {
        "shared_kv_layers": readers,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "sliding_window_pattern": slides,
        "key_length": width,
        "value_length": width,
        "key_length_swa": config["head_dim"],
        "value_length_swa": config["head_dim"],
        "rope_dimension_count_swa": config["head_dim"],
        "rope_freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if config["final_logit_softcapping"]:
        values["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config["enable_moe_block"]:
        values["expert_used_count"] = config["top_k_experts"]
    return values


def divisors(rope: dict[str, Any], width: int) -> np.ndarray:
    """The divisors of llama3's frequencies, of which no two bounds differ, as the converter writes them."""
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2, dtype=np.float32) / width)
    return np.where(lengths > rope["original_max_position_embeddings"], rope["factor"], 1).astype(np.float32)


def pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows of halves as rows of pairs, as the converter reorders them for some architectures."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def tensors(name: str, stored: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model by Hugging Face's names, as the converter takes them apart and reorders them."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for key, value in stored.items():
        expert = EXPERT.fullmatch(key)
        if expert is not None:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = value
        elif key.endswith("kv_b_proj.weight"):
            nope, width = config["qk_nope_head_dim"], config["v_head_dim"]
            k, v = value.view(heads, nope + width, -1).split([nope, width], 1)
            result |= {
                key.replace("kv_b", "k_b"): k.transpose(1, 2).contiguous(),
                key.replace("kv_b", "v_b"): v,
            }
        elif key.endswith("input_linear.weight"):
            gate, up = value.chunk(2, -2)
            stem = key.removesuffix("input_linear.weight")
            middle = "experts." if "sparse" in key else ""
            result |= {f"{stem}{middle}gate_proj.weight": gate, f"{stem}{middle}up_proj.weight": up}
        elif key.endswith("output_linear.weight"):
            middle = "experts." if "sparse" in key else ""
            result[f"{key.removesuffix('output_linear.weight')}{middle}down_proj.weight"] = value
        elif name.startswith("gemma-4"):
            if not key.endswith(("self_attn.v_norm.weight", "rotary_emb.inv_freq")):
                turned = {
                    "layer_scalar": "layer_scalar.weight",
                    "router.scale": "router.proj.scale",
                    "router.per_expert_scale": "experts.down_proj.scale",
                    "experts.gate_up_proj": "experts.gate_up_proj.weight",
                    "experts.down_proj": "experts.down_proj.weight",
                }
                end = next((end for end in turned if key.endswith(f".{end}")), "")
                result[key.removesuffix(end) + turned.get(end, "")] = value
        elif "experts.gate_up_proj" in key:
            # gpt-oss alternates gate and up, Llama 4 has one after the other; both are transposed.
            turned = value if "bias" in key else value.transpose(-1, -2)
            axis = 1 if name == "gpt-oss" or "bias" not in key else -1
            halves = (turned[:, 0::2], turned[:, 1::2]) if name == "gpt-oss" else turned.chunk(2, axis)
            for part, half in zip(("gate", "up"), halves, strict=True):
                end = "bias" if "bias" in key else "weight"
                result[f"{key.partition('gate_up')[0]}{part}_proj.{end}"] = half
        elif re.search(r"experts\.down_proj(_bias)?$", key):
            turned = value if "bias" in key else value.transpose(-1, -2)
            result[key.replace("_bias", ".bias") if "bias" in key else f"{key}.weight"] = turned
        elif key.endswith("self_attn.sinks"):
            result[f"{key}.weight"] = value
        elif name.startswith(("granite", "ministral", "mistral")) and key.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            result[key] = pairs(value, heads if "q_proj" in key else kv_heads)
        else:
            result[key] = value
    result |= {key: torch.stack([each[i] for i in range(len(each))]) for key, each in experts.items()}
    renamed = {"e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias"}
    for old, new in renamed.items():
        result = {key.replace(old, new): value for key, value in result.items()}
    return result


NAMES = {
    "layer_scalar": "layer_output_scale",
    "self_attn.qkv_proj": "attn_qkv",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.down_proj": "ffn_down_shexp",
}
"""Names that the converter gives itself, besides gguf's table."""


def write(name: str, folder: Path, path: Path, quantized: str = "", kind: str = "Q8_0") -> dict[str, Tensor]:
    """Writes the file of a case; `quantized` names the part of tensors to write in blocks of a kind. Returns the values of those, as they are
    read."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = FILES[name][0]
    shown = {**config, "rms_norm_eps": config.get("rms_norm_eps", 1e-5)}
    if name == "llama-4":
        shown["intermediate_size"] = config["intermediate_size_mlp"]
    if architecture in ("granite", "granitemoe", "deepseek2", "phi3", "chatglm"):
        shown.pop("head_dim", None)
    if architecture == "deepseek2":
        shown["num_key_value_heads"] = 1
    writer, table = new_writer(path, architecture, shown)
    keys(writer, name, config)
    read = {}
    for key, value in tensors(name, load_file(folder / "model.safetensors"), config).items():
        module, _, suffix = key.rpartition(".")
        layer = module.split(".")[2] if module.startswith("model.layers") else ""
        own = NAMES.get(module.removeprefix(f"model.layers.{layer}."))
        tensor_name = f"blk.{layer}.{own}" if own else table.get_name(module)
        assert tensor_name is not None, key
        if module == "lm_head" and config["tie_word_embeddings"]:
            continue
        data = np.ascontiguousarray(value.float().numpy())
        if quantized and quantized in key and suffix == "weight":
            raw = gguf.GGMLQuantizationType[kind]
            blocks = gguf.quants.quantize(data, raw)
            read[key] = torch.tensor(gguf.quants.dequantize(blocks, raw))
            writer.add_tensor(f"{tensor_name}.{suffix}", blocks, raw_dtype=raw)
        else:
            writer.add_tensor(f"{tensor_name}.{suffix}", data)
    rope = config.get("rope_parameters") or {}
    for entry in ("long_factor", "short_factor"):
        if entry in rope:
            writer.add_tensor(f"rope_factors_{entry.split('_')[0]}.weight", np.array(rope[entry], np.float32))
    finish(writer)
    return read


CHANGES: dict[str, dict[str, Any]] = {
    "phi-4-mini": {"original_max_position_embeddings": 400},
    "command-a": {"tie_word_embeddings": True},
    "qwen2-moe": {"decoder_sparse_step": 1},
    "gpt-oss": {
        "rope_parameters": {
            **{key: value for key, value in YARN.items() if key != "attention_factor"},
            "truncate": False,
        }
    },
    "llama-4": {"floor_scale": 64},
    "ministral-3": {
        "rope_parameters": {
            **{key: value for key, value in YARN.items() if key != "attention_factor"},
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 60,
        }
    },
    "olmo-3": {
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {**THETA, "rope_theta": 5e4}}
    },
}
