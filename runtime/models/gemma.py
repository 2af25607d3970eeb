"""Gemma 2 and 3 (arXiv:2408.00118, arXiv:2503.19786): norms before blocks and on their outputs, gelu, windows in some layers.

Checkpoints store the weights of norms less 1. Gemma 2 has soft caps; Gemma 3 has norms of q and k, and frequencies by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.checkpoints.text_part import TextPart
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, gguf_fields, layer_windows
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import (
    GGUF_ATTENTION,
    GGUF_BOTH_NORMS,
    GGUF_HEAD_NORMS,
    GGUF_MLP,
    Llama,
    decoder_table,
)
from gristmill.runtime.rope_entries import ropes_by_kind

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    return decoder_table(c, norm_modules=NORMS)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Factors, soft caps, windows and frequencies. Entries that files leave out have the values of the family."""
    second = architecture == "Gemma2ForCausalLM"
    gelu = fields.get("hidden_activation", str, None) or fields.get("hidden_act", str, "gelu_pytorch_tanh")
    if gelu not in ("gelu_pytorch_tanh", "gelu_tanh"):
        raise ConfigError(f"{fields.origin}: hidden_activation must be gelu_pytorch_tanh, got {gelu!r}")
    both, window = fields.flag("use_bidirectional_attention", False), fields.size("sliding_window", 4096)
    pattern = [SLIDING] * (fields.size("sliding_window_pattern", 2 if second else 6) - 1) + [FULL]
    values = {
        "norms": "both",
        "wide_norms": True,
        "norm_offset": fields.number("norm_offset", 1.0),  # GGUF files have it in their weights
        "activation": "gelu_tanh",
        "head_dim": fields.size("head_dim", 256),
        "qk_norm": not second,
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "softmax_scale": fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "score_cap": _cap(fields, "attn_logit_softcapping", 50.0 if second else 0.0),
        "logit_cap": _cap(fields, "final_logit_softcapping", 30.0 if second else 0.0),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "bidirectional": both,  # EmbeddingGemma (arXiv:2509.20354): half of the window is on each side
        "windows": layer_windows(fields, window // 2 if both else window, pattern),
    }
    if second:
        return values
    if values["score_cap"]:
        raise ConfigError(
            f"{fields.origin}: attn_logit_softcapping must be null for Gemma 3, whose attention has no soft cap, got {values['score_cap']}"
        )
    theta, local = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4)
    return values | ropes_by_kind(fields, pattern, theta, local)


def _cap(fields: Fields, name: str, usual: float) -> float:
    """A soft cap; null = none."""
    return float(fields.number(name, 0.0 if name in fields.data else usual))


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. Of the 27B models alone, scores have another factor than others."""
    width = values.get("attention.key_length", 256)
    fields = gguf_fields(values)
    heads, hidden = (fields.get(key, int, 0) for key in ("attention.head_count", "embedding_length"))
    if values.get("block_count") in (46, 62) and heads and hidden:
        width = hidden // heads
    return {
        "norm_offset": 0.0,
        "query_pre_attn_scalar": width,
        "sliding_window": values.get("attention.sliding_window"),
        "attn_logit_softcapping": values.get("attn_logit_softcapping"),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "rope_local_base_freq": values.get("rope.freq_base_swa"),
    }


_GGUF_MODULES = {
    **GGUF_ATTENTION,
    **GGUF_MLP,
    **GGUF_BOTH_NORMS,
}

TEXT = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
"""What files of Gemma 3 with images leave out of their text_config."""

FAMILY = Family(
    name="Gemma",
    architectures={"Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"},
    table=table,
    model=Llama,
    config=config,
    texts={"Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", TEXT)},
    gguf=(
        GgufArchitecture("gemma2", "Gemma2ForCausalLM", _GGUF_MODULES, config=_gguf),
        GgufArchitecture("gemma3", "Gemma3ForCausalLM", _GGUF_MODULES | GGUF_HEAD_NORMS, config=_gguf),
    ),
)
