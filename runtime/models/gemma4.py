"""Gemma 4 (Google, 2026), its text model: wider heads in full attention than in layers with a window, and norms of values.

The last layers may read the keys and values of earlier ones; in full attention, keys may be values too. Layers may add vectors of the token, and
scale the residual stream (`models.per_layer`); they may have experts beside the dense block (`layers.dense_and_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.text_part import TextPart
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, layer_kinds
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.loader.attention_of_layers import attention_of_layers, ropes_of_layers
from gristmill.runtime.models import Family
from gristmill.runtime.models.gemma import NORMS
from gristmill.runtime.models.gemma4_experts import Gemma4, expert_weights, read_experts
from gristmill.runtime.models.gemma4_gguf import ARCHITECTURES
from gristmill.runtime.models.llama import decoder_table, mlp
from gristmill.runtime.models.per_layer import layer_weights, model_weights

PATTERN = [SLIDING] * 5 + [FULL]
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Layers and frequencies where files do not say."""


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. Files may have projections of keys and values that no layer reads."""
    readers = [i for i in range(c.num_layers) if c.kv_source(i) != i]

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        wide = 2 if layer in readers and c.extra["wide_readers"] else 1
        yield from mlp(c, name, f"{source}.mlp", wide * c.intermediate_size)
        yield from layer_weights(c, name, source)
        if c.moe is not None:
            yield from expert_weights(c, c.moe, name, source)

    base = decoder_table(c, feed_forward, NORMS)
    unread = [
        f"model.layers.{i}.self_attn.{part}.*" for i in readers for part in ("k_proj", "v_proj", "k_norm")
    ]
    return replace(base, weights=(*base.weights, *model_weights(c)), ignored=(*base.ignored, *unread))


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Layers and what they share. Entries that files leave out have the values of the family."""
    if fields.get("use_bidirectional_attention", str, None) == "all":
        raise ConfigError(f"{fields.origin}: use_bidirectional_attention = 'all' is not supported")
    gelu = fields.get("hidden_activation", str, "gelu_pytorch_tanh")
    if gelu not in ("gelu_pytorch_tanh", "gelu_tanh"):
        raise ConfigError(f"{fields.origin}: hidden_activation must be gelu_pytorch_tanh, got {gelu!r}")
    kinds = (*layer_kinds(fields, PATTERN)[:-1], FULL)  # the last one whatever the pattern says
    window, same = fields.size("sliding_window", 512), fields.flag("attention_k_eq_v", False)
    full = {"head_dim": fields.size("global_head_dim", 512)}
    if same and (kv_heads := fields.size("num_global_key_value_heads", None)):
        full["num_key_value_heads"] = kv_heads
    layers = attention_of_layers(fields, kinds, {FULL: full}, (FULL,) if same else ())
    ropes = ropes_of_layers(fields, kinds, layers, ROPES)
    entry, rows = "hidden_size_per_layer_input", fields.size("vocab_size_per_layer_input", 262144)
    size = fields.get(entry, int, 0 if entry in fields.data else 256, least=0)
    if size and rows < fields.size("vocab_size"):
        raise ConfigError(
            f"{fields.origin}: vocab_size_per_layer_input must be at least vocab_size ({fields.size('vocab_size')}), got {rows}"
        )
    return {
        "norms": "both",
        "activation": "gelu_tanh",
        "moe": read_experts(fields) if fields.flag("enable_moe_block", False) else None,
        "qk_norm": True,
        "v_norm": True,
        "softmax_scale": 1.0,
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "logit_cap": fields.number("final_logit_softcapping", 0.0),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "layer_attention": layers,
        "head_dim": layers[0].head_dim,
        "rope_dim": layers[0].rope_dim,
        "rope": ropes[-1],
        "layer_ropes": ropes,
        "windows": tuple(window if kind == SLIDING else 0 for kind in kinds),
        "extra": {
            "vector_size": size,
            "vector_rows": rows,
            "wide_readers": fields.flag("use_double_wide_mlp", False),
            "experts_apart": fields.flag("experts_apart", False),
        },
    }


FAMILY = Family(
    name="Gemma 4",
    architectures={"Gemma4ForCausalLM": "gemma4_text"},
    table=table,
    model=Gemma4,
    config=config,
    texts={"Gemma4ForConditionalGeneration": TextPart("Gemma4ForCausalLM")},
    gguf=ARCHITECTURES,
)
