"""OLMo 2 and 3 (arXiv:2501.00656; Olmo 3, 2025): Llama with norms on the outputs of blocks, not before them, and of q and k over all heads.

OLMo 3 has windows in three of four layers; scaled rotary embeddings are those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, layer_windows
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
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
PATTERN = (SLIDING, SLIDING, SLIDING, FULL)
"""Layers without ``layer_types``."""


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    return decoder_table(c, norm_modules=NORMS)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Norms, and windows and frequencies by layer of OLMo 3."""
    values: dict[str, Any] = {"norms": "post", "qk_norm_whole": True}
    if architecture == "Olmo2ForCausalLM":
        return values
    theta = fields.number("rope_theta", 500000.0)
    window = fields.size("sliding_window", 4096)
    values["windows"] = layer_windows(fields, window, PATTERN)
    return values | ropes_by_kind(fields, PATTERN, theta, theta)


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. Files of OLMo 3 are those with windows; the kinds of layers are the family's."""
    window = values.get("attention.sliding_window")
    third = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window}
    table = {"rope_type": values.get("rope.scaling.type"), "factor": values.get("rope.scaling.factor")}
    table["attention_factor"] = values.get("rope.scaling.attn_factor")
    table["original_max_position_embeddings"] = values.get("rope.scaling.original_context_length")
    return (third if window else {}) | ({"rope_scaling": table} if table["rope_type"] == "yarn" else {})


FAMILY = Family(
    name="OLMo",
    architectures={"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3"},
    table=table,
    model=Llama,
    config=config,
    defaults={name: {"rms_norm_eps": 1e-5} for name in ("Olmo2ForCausalLM", "Olmo3ForCausalLM")},
    gguf=(
        GgufArchitecture(
            "olmo2",
            "Olmo2ForCausalLM",
            GGUF_ATTENTION | GGUF_HEAD_NORMS | GGUF_MLP | GGUF_BOTH_NORMS,
            config=_gguf,
        ),
    ),
)
