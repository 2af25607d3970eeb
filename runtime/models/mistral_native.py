"""Mistral's own directories: params.json, consolidated.safetensors, tekken.json, of Mistral and Mixtral.

q and k are for a rotation of neighbouring pairs. Weights in fp8 have one scale each, ``qscale_weight``, and one for the activations that they are
multiplied with, ``qscale_act``; both are multipliers. Encoders of images are left out. Names are those of mistral-inference and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.native import NativeLayout
from gristmill.runtime.config import FULL, SLIDING, Fields
from gristmill.runtime.errors import ConfigError


def config(params: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """Entries of config.json from those of params.json. Every tokenizer of Mistral has 1 and 2 for begin and end."""
    fields = Fields(params, origin)
    for entry in ("multimodal", "q_lora_rank", "lora"):
        if params.get(entry):
            raise ConfigError(f"{origin}: {entry} is not read in this layout: load the files of Hugging Face")
    return {
        "architectures": ["MistralForCausalLM"],
        **{theirs: fields.data.get(own) for own, theirs in PARAMS.items()},
        "max_position_embeddings": fields.size("max_position_embeddings", None)
        or fields.size("max_seq_len", 128000),
        "tie_word_embeddings": fields.flag("tied_embeddings", False),
        "rope_parameters": _rope(fields),
        "rope_interleave": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_windows(fields),
        **_experts(fields),
        **_quantization(fields),
    }


def _rope(fields: Fields) -> Mapping[str, Any]:
    """Frequencies, and the factor of queries by their position."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope_theta", 10000.0)}
    if fields.data.get("yarn"):
        yarn = Fields(fields.data["yarn"], f"{fields.origin}: yarn")
        rope |= {"rope_type": "yarn", "factor": yarn.number("factor")}
        rope["original_max_position_embeddings"] = yarn.size("original_max_position_embeddings")
        rope |= {"beta_fast": yarn.number("beta", 32.0), "beta_slow": yarn.number("alpha", 1.0)}
        rope |= {} if yarn.flag("apply_scale", True) else {"attention_factor": 1.0}
    if fields.data.get("llama_4_scaling"):
        scaling = Fields(fields.data["llama_4_scaling"], f"{fields.origin}: llama_4_scaling")
        rope["llama_4_scaling_beta"] = scaling.number("beta")
        rope["original_max_position_embeddings"] = scaling.size("original_max_position_embeddings")
    return rope


def _windows(fields: Fields) -> Mapping[str, Any]:
    """The window of all layers, or those of the first layers, null = none, which are repeated."""
    window = fields.get("sliding_window", (int, list), None)
    if not isinstance(window, list):
        return {"sliding_window": window}
    layers, sizes = fields.size("n_layers"), {size for size in window if size is not None}
    if len(sizes) != 1 or layers % len(window):
        raise ConfigError(
            f"{fields.origin}: sliding_window must have one size or null for each of some layers that divide {layers}, got {window!r}"
        )
    kinds = [FULL if size is None else SLIDING for size in window] * (layers // len(window))
    return {"sliding_window": sizes.pop(), "layer_types": kinds}


def _experts(fields: Fields) -> Mapping[str, Any]:
    """Mixtral's experts. Those of Mistral Large 3 have further entries."""
    moe = Fields(fields.get("moe", dict, None) or {}, f"{fields.origin}: moe")
    known = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
    further = {name: value for name, value in moe.data.items() if name not in known and value is not None}
    if further:
        found = ", ".join(f"{name} = {value!r}" for name, value in further.items())
        raise ConfigError(
            f"{moe.origin}: {found}: of experts, only Mixtral's are read in this layout ({', '.join(known)})"
        )
    if not moe.data:
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        **{theirs: moe.size(own) for own, theirs in known.items()},
    }


def _quantization(fields: Fields) -> Mapping[str, Any]:
    """fp8 with a scale for each weight, and one, or none, for its activations."""
    entries = Fields(fields.get("quantization", dict, None) or {}, f"{fields.origin}: quantization")
    if not entries.data:
        return {}
    weight, activations = entries.data.get("qformat_weight"), entries.data.get("qscheme_act") or "TENSOR"
    if weight != "fp8_e4m3" or activations not in ("TENSOR", "NO_SCALES"):
        raise ConfigError(
            f"{entries.origin} {dict(entries.data)!r} is not read in this layout; known: qformat_weight 'fp8_e4m3' with qscheme_act 'TENSOR' or "
            "'NO_SCALES'"
        )
    scheme = "static" if activations == "TENSOR" else "dynamic"
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme}}


PARAMS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""params.json -> config.json."""
NATIVE = NativeLayout(
    params="params.json",
    weights="consolidated",
    outer={"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    modules={
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.gate": "block_sparse_moe.gate",
        "feed_forward.experts.{expert}.w1": "block_sparse_moe.experts.{expert}.w1",
        "feed_forward.experts.{expert}.w2": "block_sparse_moe.experts.{expert}.w2",
        "feed_forward.experts.{expert}.w3": "block_sparse_moe.experts.{expert}.w3",
    },
    tensors={"qscale_weight": "weight_scale", "qscale_act": "input_scale"},
    left_out=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
    config=config,
)
