"""Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388): Llama with biases of q, k and v, or with norms of their heads.

Those with MoE have experts instead of the feed-forward block, except in layers that the configuration names; Qwen2-MoE has a shared one too, with
a weight of its own in each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig, MoeConfig
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import (
    GGUF_ATTENTION,
    GGUF_HEAD_NORMS,
    GGUF_MLP,
    Llama,
    decoder_table,
    mlp,
)


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        if c.is_moe_layer(layer):
            yield from experts(c, name, f"{source}.mlp", ("gate_proj", "up_proj", "down_proj"))
            if c.moe is not None and c.moe.shared_gate:
                gate = f"{source}.mlp.shared_expert_gate.weight"
                yield from mlp(c, f"{name}.shared", f"{source}.mlp.shared_expert", c.extra["shared_size"])
                yield Weight(f"{name}.shared_gate", (gate,), (1,), c.hidden_size, "fp32")
        else:
            yield from mlp(c, name, f"{source}.mlp")

    return decoder_table(c, feed_forward)


def experts(c: ModelConfig, name: str, source: str, names: tuple[str, str, str]) -> Iterator[Weight]:
    """A router in float32 and experts, with these `names` of their gate, up and down projections."""
    moe = c.moe
    if moe is None:
        return
    gate, up, down = (f"{source}.experts.{{expert}}.{part}" for part in names)
    count, ffn = moe.num_experts, moe.intermediate_size
    by_expert = ShardSpec.experts(count)
    yield Weight(f"{name}.router", (f"{source}.gate.weight",), (count,), c.hidden_size, "fp32")
    yield Weight(
        f"{name}.experts.gate_up", (gate, up), (ffn, ffn), c.hidden_size, "linear", count, shard=by_expert
    )
    yield Weight(f"{name}.experts.down", (down,), (c.hidden_size,), ffn, "linear", count, shard=by_expert)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Biases, norms of heads, experts; the sliding window is used only if ``use_sliding_window`` is set."""
    values: dict[str, Any] = {} if fields.flag("use_sliding_window", False) else {"windows": ()}
    if architecture == "Qwen2ForCausalLM":
        return values | {"qkv_bias": True}
    if architecture == "Qwen3ForCausalLM":
        return values | {"qk_norm": True}
    if architecture == "Qwen2MoeForCausalLM":
        moe = replace(_moe(fields), num_shared=1, shared_gate=True)
        extra = {"shared_size": fields.size("shared_expert_intermediate_size")}
        return values | {"qkv_bias": fields.flag("qkv_bias", True), "moe": moe, "extra": extra}
    return values | {"qk_norm": True, "moe": _moe(fields)}


def _moe(fields: Fields) -> MoeConfig:
    count = fields.size("num_local_experts", None) or fields.size(
        "num_experts"
    )  # transformers 5 uses the first name
    inner, step = fields.size("moe_intermediate_size"), fields.size("decoder_sparse_step", 1)
    only = fields.get("mlp_only_layers", list, [])
    dense = tuple(i for i in range(fields.size("num_hidden_layers")) if i in only or (i + 1) % step)
    return MoeConfig.most_probable(fields, count, inner, fields.flag("norm_topk_prob", False), dense)


def _gguf_experts(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys."""
    inner = values.get("expert_feed_forward_length")
    return {
        "moe_intermediate_size": inner,
        "intermediate_size": values.get("feed_forward_length", inner),
        "norm_topk_prob": True,
    }


def _gguf_shared(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """As `_gguf_experts`, for Qwen2-MoE: with the shared expert, and the probabilities of the chosen ones as they are."""
    return {
        **_gguf_experts(values),
        "norm_topk_prob": False,
        "qkv_bias": values["q_bias"],
        "shared_expert_intermediate_size": values.get("expert_shared_feed_forward_length"),
    }


GGUF_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{expert}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{expert}.up_proj": "ffn_up_exps",
    "mlp.experts.{expert}.down_proj": "ffn_down_exps",
}
"""Experts and their router, and ggml's names of them."""

FAMILY = Family(
    name="Qwen2 and Qwen3, with MoE",
    architectures={
        "Qwen2ForCausalLM": "qwen2",
        "Qwen2MoeForCausalLM": "qwen2_moe",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
    },
    table=table,
    model=Llama,
    config=config,
    gguf=(
        GgufArchitecture("qwen2", "Qwen2ForCausalLM", GGUF_ATTENTION | GGUF_MLP),
        GgufArchitecture("qwen3", "Qwen3ForCausalLM", GGUF_HEAD_NORMS | GGUF_ATTENTION | GGUF_MLP),
        GgufArchitecture(
            "qwen2moe",
            "Qwen2MoeForCausalLM",
            {
                **GGUF_ATTENTION,
                **GGUF_EXPERTS,
                "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
                "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
                "mlp.shared_expert.up_proj": "ffn_up_shexp",
                "mlp.shared_expert.down_proj": "ffn_down_shexp",
            },
            experts=True,
            config=_gguf_shared,
        ),
        GgufArchitecture(
            "qwen3moe",
            "Qwen3MoeForCausalLM",
            GGUF_HEAD_NORMS | GGUF_ATTENTION | GGUF_EXPERTS,
            experts=True,
            config=_gguf_experts,
        ),
    ),
)
