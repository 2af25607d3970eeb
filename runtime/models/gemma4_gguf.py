"""GGUF files of Gemma 4: ggml's names of its modules, and what their keys say about layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.quant.formats.gguf import GgufArchitecture, GgufFile
from gristmill.runtime.config import FULL, SLIDING, gguf_fields
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models.llama import GGUF_ATTENTION, GGUF_BOTH_NORMS, GGUF_HEAD_NORMS, GGUF_MLP

MODULES = {
    **GGUF_ATTENTION,
    **GGUF_MLP,
    **GGUF_BOTH_NORMS,
    **GGUF_HEAD_NORMS,
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
EXPERTS = {
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.{expert}.gate_up_proj": "ffn_gate_up_exps",
    "experts.{expert}.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
OUTSIDE = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
NEVER = 1e20
"""Frequencies divided by more than this are those of pairs that are not rotated."""


def config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. Heads, windows and widths are given by layer; which keys are values too, by missing tensors.

    Raises:
        ConfigError: layers that the keys do not describe as the converter does.
    """
    file: GgufFile = values["file"]
    fields = gguf_fields(values)
    layers, shared = fields.get("block_count", int, 0), fields.get("attention.shared_kv_layers", int, 0)
    slides = _by_layer(values, "attention.sliding_window_pattern", layers, True)
    kv_heads = _by_layer(values, "attention.head_count_kv", layers, values.get("attention.head_count"))
    widths = _by_layer(values, "feed_forward_length", layers, None)
    full = [i for i in range(layers) if not slides[i]]
    missing = [f"model.layers.{i}.self_attn.v_proj.weight" not in file for i in full if i < layers - shared]
    width = values.get("attention.key_length_swa")
    vectors, rows = values.get("embedding_length_per_layer_input", 0), "model.embed_tokens_per_layer.weight"
    entries = {
        "layer_types": [SLIDING if one else FULL for one in slides],
        "head_dim": width,
        "rotary_dim": width,
        "global_head_dim": values.get("attention.key_length"),
        "num_key_value_heads": next(
            (n for n, one in zip(kv_heads, slides, strict=True) if one), kv_heads[-1]
        ),
        "num_global_key_value_heads": next(iter(kv_heads[i] for i in full), None),
        "attention_k_eq_v": any(missing),
        "num_kv_shared_layers": shared,
        "sliding_window": values.get("attention.sliding_window"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": vectors,
        "vocab_size_per_layer_input": file.shape(rows)[0] if vectors and rows in file else None,
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated(file),
                "rope_theta": values.get("rope.freq_base", 1e6),
            },
            SLIDING: {"rope_theta": values.get("rope.freq_base_swa", 1e4)},
        },
    }
    if "expert_count" not in values:
        return entries
    return entries | {
        "enable_moe_block": True,
        "experts_apart": True,
        "num_experts": values["expert_count"],
        "top_k_experts": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
    }


def _by_layer(values: Mapping[str, Any], key: str, layers: int, usual: Any) -> Sequence[Any]:
    """The values of a key for each layer, of which files have one or as many as layers."""
    value = values.get(key, usual)
    if not isinstance(value, list):
        return [value] * max(1, layers)
    if len(value) != layers:
        raise ConfigError(f"gemma4.{key} must have a value for each of {layers} layers, got {len(value)}")
    return value


def _rotated(file: GgufFile) -> float:
    """The share of the pairs of a head in full attention that are rotated: those whose frequencies are not divided."""
    factors = file.rope_factors
    if not factors:
        return 1.0
    rotated = sum(factor == 1 for factor in factors)
    if any(factor < NEVER for factor in factors[rotated:]):
        raise ConfigError(
            f"{file.path}: rope_freqs.weight must be 1 for the first pairs and above {NEVER:g} for the others"
        )
    return rotated / len(factors)


ARCHITECTURES = tuple(
    GgufArchitecture("gemma4", "Gemma4ForCausalLM", modules, experts, OUTSIDE, config=config, routed=True)
    for experts, modules in ((False, MODULES), (True, MODULES | EXPERTS))
)
