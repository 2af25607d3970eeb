"""Granite 3 (IBM, 2024): Llama with factors of embeddings, scores, residual and logits; with experts, and shared ones, in GraniteMoe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig, MoeConfig
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, GGUF_MLP, Llama, decoder_table, mlp
from gristmill.runtime.models.phi3 import fused
from gristmill.runtime.models.qwen import experts as experts_apart


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. The experts of a layer are one tensor, with gate before up; in GGUF files, they are apart."""
    return decoder_table(c, partial(_experts, c)) if c.moe else decoder_table(c)


def _experts(c: ModelConfig, name: str, source: str, layer: int) -> Iterator[Weight]:
    if c.moe is None:
        return
    if c.extra["experts_apart"]:
        parts = ("gate_proj", "up_proj", "down_proj")
        yield from experts_apart(c, name, f"{source}.block_sparse_moe", parts)
        if c.moe.num_shared:
            yield from mlp(c, f"{name}.shared", f"{source}.shared_mlp", c.extra["shared_size"])
        return
    hidden, ffn, experts = c.hidden_size, c.moe.intermediate_size, c.moe.num_experts
    block, to = f"{source}.block_sparse_moe", f"{name}.experts"
    stacked = partial(
        Weight,
        kind="linear",
        experts=experts,
        stacked=True,
        rows_first=True,
        shard=ShardSpec.experts(experts),
    )
    yield Weight(f"{name}.router", (f"{block}.router.layer.weight",), (experts,), hidden, "fp32")
    yield stacked(f"{to}.gate_up", (f"{block}.input_linear.weight",), (2 * ffn,), hidden)
    yield stacked(f"{to}.down", (f"{block}.output_linear.weight",), (hidden,), ffn)
    if c.moe.num_shared:
        for weight in mlp(c, f"{name}.shared", f"{source}.shared_mlp", c.extra["shared_size"]):
            yield (
                fused(weight, "input_linear")
                if weight.target.endswith("gate_up")
                else replace(weight, sources=(f"{source}.shared_mlp.output_linear",))
            )


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """The factors; experts as Mixtral's, and the size of the shared one."""
    values: dict[str, Any] = {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "softmax_scale": fields.number("attention_multiplier", 1.0),
        "logit_scale": 1 / fields.positive("logits_scaling", 1.0),
    }
    if architecture == "GraniteForCausalLM":
        return values
    shared = fields.get("shared_intermediate_size", int, 0, least=0)
    moe = MoeConfig.most_probable(fields, fields.size("num_local_experts"), fields.size("intermediate_size"))
    return values | {
        "moe": replace(moe, num_shared=int(shared > 0)),
        "extra": {"shared_size": shared, "experts_apart": fields.flag("experts_apart", False)},
    }


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys."""
    shared = values.get("expert_shared_feed_forward_length", 0)
    return {
        "embedding_multiplier": values.get("embedding_scale", 1.0),
        "residual_multiplier": values.get("residual_scale", 1.0),
        "attention_multiplier": values.get("attention.scale", 1.0),
        "logits_scaling": values.get("logit_scale", 1.0),
        "shared_intermediate_size": shared,
        "experts_apart": True,
    } | ({"architectures": ["GraniteMoeSharedForCausalLM"]} if shared else {})


FAMILY = Family(
    name="Granite",
    architectures={
        "GraniteForCausalLM": "granite",
        "GraniteMoeForCausalLM": "granitemoe",
        "GraniteMoeSharedForCausalLM": "granitemoeshared",
    },
    table=table,
    model=Llama,
    config=config,
    gguf=(
        GgufArchitecture(
            "granite", "GraniteForCausalLM", GGUF_ATTENTION | GGUF_MLP, paired=True, config=_gguf
        ),
        GgufArchitecture(
            "granitemoe",
            "GraniteMoeForCausalLM",
            {
                **GGUF_ATTENTION,
                "block_sparse_moe.gate": "ffn_gate_inp",
                "block_sparse_moe.experts.{expert}.gate_proj": "ffn_gate_exps",
                "block_sparse_moe.experts.{expert}.up_proj": "ffn_up_exps",
                "block_sparse_moe.experts.{expert}.down_proj": "ffn_down_exps",
                "shared_mlp.gate_proj": "ffn_gate_shexp",
                "shared_mlp.up_proj": "ffn_up_shexp",
                "shared_mlp.down_proj": "ffn_down_shexp",
            },
            experts=True,
            paired=True,
            config=_gguf,
        ),
    ),
)
