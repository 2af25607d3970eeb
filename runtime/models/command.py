"""Command R and A (Cohere, 2024 and 2025, arXiv:2504.00698): attention and feed-forward block after one LayerNorm.

Command R+ has LayerNorm of each head of q and k. Command R7B and A (Cohere2) have windows in three of four layers, and no position in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, layer_kinds, layer_windows
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import (
    GGUF_ATTENTION,
    GGUF_HEAD_NORMS,
    GGUF_MLP,
    Llama,
    ParallelLayer,
    decoder_table,
)
from gristmill.runtime.rope_entries import parse_rope, rope_table


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    return decoder_table(c, norm_modules={"attention_norm": "input_layernorm"})


class Command(Llama):
    """CohereForCausalLM and Cohere2ForCausalLM."""

    make_layer: ClassVar[Callable[..., Any]] = ParallelLayer


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """LayerNorm, the factor of logits; windows and positions by layer of Cohere2. Entries that files leave out have the family's values."""
    values: dict[str, Any] = {
        "norm": "layer",
        "rms_eps": fields.number("layer_norm_eps", 1e-5),
        "rope_interleaved": True,
        "logit_scale": fields.number("logit_scale", 0.0625),
        "qk_norm_heads": fields.flag("use_qk_norm", False),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }
    if architecture == "CohereForCausalLM":
        return values
    pattern = [SLIDING] * (fields.size("sliding_window_pattern", 4) - 1) + [FULL]
    rope = parse_rope(fields, rope_table(fields), fields.number("rope_theta", 10000.0))
    values["windows"] = layer_windows(fields, fields.size("sliding_window", 4096), pattern)
    kinds = layer_kinds(fields, pattern)
    return values | {"layer_ropes": tuple(rope if kind == SLIDING else None for kind in kinds)}


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys."""
    return {
        "layer_norm_eps": values.get("attention.layer_norm_epsilon"),
        "logit_scale": values.get("logit_scale"),
        "sliding_window": values.get("attention.sliding_window"),
        "use_qk_norm": values["q_norm"],
    }


FAMILY = Family(
    name="Command",
    architectures={"CohereForCausalLM": "cohere", "Cohere2ForCausalLM": "cohere2"},
    table=table,
    model=Command,
    config=config,
    defaults={"CohereForCausalLM": {"rope_theta": 5e5}},
    gguf=(
        GgufArchitecture(
            "command-r", "CohereForCausalLM", GGUF_ATTENTION | GGUF_HEAD_NORMS | GGUF_MLP, config=_gguf
        ),
        GgufArchitecture("cohere2", "Cohere2ForCausalLM", GGUF_ATTENTION | GGUF_MLP, config=_gguf),
    ),
)
