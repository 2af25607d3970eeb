"""Llama 4 (Meta, 2025), its text model: experts after a shared one, which take their weight on the input; layers without position.

Layers with position have rotary embeddings of neighbouring pairs, norms of q and k without weights, and attention within chunks. The others attend
to everything, with queries that grow by the logarithm of their position (Nakanishi, 2025, arXiv:2501.19399).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.text_part import TextPart
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import CHUNKED, FULL, Fields, ModelConfig, MoeConfig, QueryScale, layer_kinds
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, Llama, decoder_table, mlp
from gristmill.runtime.models.qwen import experts
from gristmill.runtime.rope_entries import parse_rope, rope_table

SPAN = 8192
"""Tokens of a chunk, and positions with the same factor of queries, in every model of Llama 4."""


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. The experts of a layer are one tensor, transposed, with gate before up; in GGUF files, they are apart."""

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        block = f"{source}.feed_forward"
        if c.moe is None or not c.is_moe_layer(layer):
            yield from mlp(c, name, block)
            return
        ffn, parts = c.moe.intermediate_size, ("gate_proj", "up_proj", "down_proj")
        router, gate_up, down = experts(c, name, block, parts)
        yield replace(router, sources=(f"{block}.router.weight",))
        if c.extra["experts_apart"]:
            yield from (gate_up, down)
        else:
            yield replace(gate_up, sources=(f"{block}.experts.gate_up_proj",), rows=(2 * ffn,), stacked=True)
            yield replace(down, sources=(f"{block}.experts.down_proj",), stacked=True)
        yield from mlp(c, f"{name}.shared", f"{block}.shared_expert", ffn)

    return decoder_table(c, feed_forward)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Experts, and what layers with position and those without it have. Entries that files leave out have the family's values."""
    layers, inner = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    rope = parse_rope(fields, rope_table(fields), fields.number("rope_theta", 500000.0))
    if rope.table_factor != 1:
        raise ConfigError(
            f"{fields.origin}: frequencies with a factor of cosines ({rope.kind}), which norms after them would undo"
        )
    usual = [(i + 1) % fields.size("no_rope_layer_interval", 4) for i in range(layers)]
    rotates = fields.get("no_rope_layers", list, None) or usual
    if len(rotates) < layers:
        raise ConfigError(
            f"{fields.origin}: no_rope_layers must have an entry for each of {layers} layers, got {rotates}"
        )
    kinds = layer_kinds(fields, [CHUNKED if rotates[i] else FULL for i in range(layers)], (CHUNKED, FULL))
    step = fields.size("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers", list, range(step - 1, layers, step))
    dense = tuple(i for i in range(layers) if i not in sparse)
    moe = MoeConfig.most_probable(fields, fields.size("num_local_experts"), inner, False, dense)
    chunk = fields.size("attention_chunk_size", None) or 0
    scale = QueryScale(
        fields.number("attn_scale", 0.1), fields.number("floor_scale", SPAN), shift=1, unrotated=True
    )
    return {
        "intermediate_size": fields.size("intermediate_size_mlp"),
        "moe": replace(moe, num_shared=1, scoring="sigmoid", weigh_input=True),
        "rope_interleaved": True,
        "layer_ropes": tuple(rope if rotated else None for rotated in rotates[:layers]),
        "chunks": tuple(chunk if kind == CHUNKED else 0 for kind in kinds),
        "qk_norm_plain": fields.flag("use_qk_norm", True),
        "query_scale": scale if fields.flag("attn_temperature_tuning", True) else None,
        "extra": {"experts_apart": fields.flag("experts_apart", False)},
    }


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. The spans are those of all models; the one with 128 experts has no norms of q and k."""
    if values.get("attention.sliding_window") == 0:
        raise ConfigError("llama4.attention.sliding_window = 0, a model without chunks, is not read")
    return {
        "intermediate_size": values.get("expert_feed_forward_length"),
        "intermediate_size_mlp": values.get("feed_forward_length"),
        "interleave_moe_layer_step": values.get("interleave_moe_layer_step"),
        "attention_chunk_size": SPAN,
        "floor_scale": SPAN,
        "use_qk_norm": values.get("expert_count") != 128,
        "experts_apart": True,
    }


FAMILY = Family(
    name="Llama 4",
    architectures={"Llama4ForCausalLM": "llama4_text"},
    table=table,
    model=Llama,
    config=config,
    defaults={"Llama4ForCausalLM": {"rms_norm_eps": 1e-5, "attention_chunk_size": SPAN}},
    gguf=(
        GgufArchitecture(
            "llama4",
            "Llama4ForCausalLM",
            {
                **GGUF_ATTENTION,
                "feed_forward.router": "ffn_gate_inp",
                **{
                    f"feed_forward.{place}{part}_proj": f"ffn_{part}{end}"
                    for place, end in (("", ""), ("experts.{expert}.", "_exps"), ("shared_expert.", "_shexp"))
                    for part in ("gate", "up", "down")
                },
            },
            experts=True,
            config=_gguf,
        ),
    ),
    # As in Mistral: a text_config is read without what is null.
    texts={"Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", {"attention_chunk_size": None})},
)
