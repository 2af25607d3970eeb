"""MiniMax-M2 (2025): Mixtral's experts chosen as DeepSeek-V3's, norms of q and k over all heads, half of each head rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig, MoeConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, GGUF_HEAD_NORMS, Llama, decoder_table
from gristmill.runtime.models.qwen import experts
from gristmill.runtime.rope_entries import rotated


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters; w1 is the gate, w3 up, w2 down."""

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        block = f"{source}.block_sparse_moe"
        yield from experts(c, name, block, ("w1", "w3", "w2"))
        if c.moe is not None and c.moe.choice_bias:
            count = (c.moe.num_experts,)
            yield Weight(f"{name}.router.bias", (f"{block}.e_score_correction_bias",), count, None, "fp32")

    return decoder_table(c, feed_forward)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Experts by sigmoid scores with a bias for the choice."""
    expected = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_qk_norm": True}
    expected |= {"use_routing_bias": True, "shared_intermediate_size": 0}
    for entry, value in expected.items():
        if (given := fields.data.get(entry, value)) != value:
            raise ConfigError(f"{fields.origin}: {entry} must be {value!r} for MiniMax-M2, got {given!r}")
    moe = MoeConfig.most_probable(fields, fields.size("num_local_experts"), fields.size("intermediate_size"))
    return {
        "qk_norm_whole": True,
        "rope_dim": rotated(fields),
        "moe": replace(moe, scoring="sigmoid", choice_bias=True),
    }


FAMILY = Family(
    name="MiniMax-M2",
    architectures={"MiniMaxM2ForCausalLM": "minimax_m2"},
    table=table,
    model=Llama,
    config=config,
    defaults={"MiniMaxM2ForCausalLM": {"rope_theta": 5e6}},
    gguf=(
        GgufArchitecture(
            "minimax-m2",
            "MiniMaxM2ForCausalLM",
            {
                **GGUF_HEAD_NORMS,
                **GGUF_ATTENTION,
                "block_sparse_moe.gate": "ffn_gate_inp",
                "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
                "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
                "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
                "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
            },
            experts=True,
            routed=True,
            config=lambda values: {"intermediate_size": values.get("expert_feed_forward_length")},
        ),
    ),
)
