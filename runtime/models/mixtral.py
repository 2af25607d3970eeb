"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Llama with experts in every layer, two of them per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig, MoeConfig
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, Llama, decoder_table
from gristmill.runtime.models.qwen import experts


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters; w1 is the gate, w3 up, w2 down."""
    return decoder_table(
        c, lambda name, source, layer: experts(c, name, f"{source}.block_sparse_moe", ("w1", "w3", "w2"))
    )


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Experts of the size of a dense block; the weights of the chosen experts are normalized to sum to 1."""
    count, inner = fields.size("num_local_experts"), fields.size("intermediate_size")
    pairs = fields.flag("rope_interleave", False)  # in Mistral's own directories
    return {"moe": MoeConfig.most_probable(fields, count, inner), "rope_interleaved": pairs}


FAMILY = Family(
    name="Mixtral",
    architectures={"MixtralForCausalLM": "mixtral"},
    table=table,
    model=Llama,
    config=config,
    defaults={"MixtralForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 1e6}},
    gguf=(
        GgufArchitecture(
            "llama",
            "MixtralForCausalLM",
            {
                **GGUF_ATTENTION,
                "block_sparse_moe.gate": "ffn_gate_inp",
                "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
                "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
                "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
            },
            experts=True,
            paired=True,
        ),
    ),
)
