"""AFMoE (Arcee Trinity, 2025): attention whose output is gated, norms before blocks and on their outputs, DeepSeek-V3's experts in one group.

Layers with a window have rotary embeddings, those without one no position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, MoeConfig, layer_kinds, layer_windows
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import (
    GGUF_ATTENTION,
    GGUF_HEAD_NORMS,
    GGUF_MLP,
    Llama,
    decoder_table,
    mlp,
)
from gristmill.runtime.models.qwen import GGUF_EXPERTS, experts
from gristmill.runtime.rope_entries import parse_rope, rope_table

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        block, moe = f"{source}.mlp", c.moe
        if moe is None or not c.is_moe_layer(layer):
            yield from mlp(c, name, block)
            return
        router, *others = experts(c, name, block, ("gate_proj", "up_proj", "down_proj"))
        yield replace(router, sources=(f"{block}.router.gate.weight",))
        yield Weight(f"{name}.router.bias", (f"{block}.expert_bias",), (moe.num_experts,), None, "fp32")
        yield from others
        if moe.num_shared:
            ffn = moe.intermediate_size * moe.num_shared
            yield from mlp(c, f"{name}.shared", f"{block}.shared_experts", ffn)

    return decoder_table(c, feed_forward, NORMS)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """The gate, experts, windows and positions by layer. Entries that files leave out have the family's values."""
    pattern = [SLIDING] * (fields.size("global_attn_every_n_layers", 4) - 1) + [FULL]
    rope = parse_rope(fields, rope_table(fields), fields.number("rope_theta", 10000.0))
    moe = MoeConfig.most_probable(fields, fields.size("num_experts"), fields.size("moe_intermediate_size"))
    moe = replace(
        moe,
        num_shared=fields.get("num_shared_experts", int, 0, least=0),
        first_dense=fields.get("num_dense_layers", int, 0, least=0),
        scale=fields.number("route_scale", 1.0),
        scoring="sigmoid",
        choice_bias=True,
    )
    return {
        "norms": "both",
        "qk_norm": True,
        "attention_gate": True,
        "embedding_scale": fields.size("hidden_size") ** 0.5 if fields.flag("mup_enabled", False) else 1.0,
        "moe": moe,
        "windows": layer_windows(fields, fields.size("sliding_window", 1024), pattern),
        "layer_ropes": tuple(rope if kind == SLIDING else None for kind in layer_kinds(fields, pattern)),
    }


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. Every fourth layer sees the whole context."""
    return {
        "num_experts": values.get("expert_count"),
        "num_shared_experts": values.get("expert_shared_count"),
        "num_dense_layers": values.get("leading_dense_block_count"),
        "route_scale": values.get("expert_weights_scale"),
        "sliding_window": values.get("attention.sliding_window"),
        "mup_enabled": True,
    }


FAMILY = Family(
    name="AFMoE",
    architectures={"AfmoeForCausalLM": "afmoe"},
    table=table,
    model=Llama,
    config=config,
    defaults={"AfmoeForCausalLM": {"rms_norm_eps": 1e-5}},
    gguf=(
        GgufArchitecture(
            "afmoe",
            "AfmoeForCausalLM",
            {
                **GGUF_ATTENTION,
                **GGUF_HEAD_NORMS,
                **GGUF_MLP,
                **GGUF_EXPERTS,
                "self_attn.gate_proj": "attn_gate",
                "post_attention_layernorm": "post_attention_norm",
                "pre_mlp_layernorm": "ffn_norm",
                "post_mlp_layernorm": "post_ffw_norm",
                "mlp.router.gate": "ffn_gate_inp",
                "mlp.expert_bias": "exp_probs_b.bias",
                "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
                "mlp.shared_experts.up_proj": "ffn_up_shexp",
                "mlp.shared_experts.down_proj": "ffn_down_shexp",
            },
            experts=True,
            routed=True,
            config=_gguf,
        ),
    ),
)
