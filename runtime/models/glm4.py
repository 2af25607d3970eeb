"""GLM-4 (arXiv:2406.12793): Llama with half of each head rotated by neighbouring pairs, and gate and up in one tensor.

GLM-4-0414 has norms on the outputs of its blocks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import GGUF_ATTENTION, PRE_NORMS, Llama, decoder_table
from gristmill.runtime.models.phi3 import GGUF_FUSED, fused, fused_mlp
from gristmill.runtime.rope_entries import rotated

NORMS = {
    **PRE_NORMS,
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    norms = PRE_NORMS if c.norms == "pre" else NORMS
    base = decoder_table(c, lambda name, source, layer: fused_mlp(c, name, source), norms)
    if not c.extra["fused_qkv"]:
        return base
    qkv = (".qkv", ".qkv.bias")
    weights = [
        fused(weight, "qkv_proj") if weight.target.endswith(qkv) else weight for weight in base.weights
    ]
    return replace(base, weights=tuple(weights))


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Biases of q, k and v under ``attention_bias``, which is about the output too in other families."""
    return {
        "attention_bias": False,
        "qkv_bias": fields.flag("attention_bias", True),
        "rope_interleaved": True,
        "rope_dim": rotated(fields, usual=0.5),
        "norms": "pre" if architecture == "GlmForCausalLM" else "both",
        "extra": {"fused_qkv": fields.flag("fused_qkv", False)},
    }


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. Of files of THUDM's own layout, q, k and v are one tensor."""
    return {"attention_bias": values["q_bias"], "fused_qkv": values["fused_qkv"]}


FAMILY = Family(
    name="GLM-4",
    architectures={"GlmForCausalLM": "glm", "Glm4ForCausalLM": "glm4"},
    table=table,
    model=Llama,
    config=config,
    defaults={name: {"rms_norm_eps": 1.5625e-07} for name in ("GlmForCausalLM", "Glm4ForCausalLM")},
    gguf=(
        GgufArchitecture("chatglm", "GlmForCausalLM", GGUF_ATTENTION | GGUF_FUSED, config=_gguf),
        GgufArchitecture(
            "glm4",
            "Glm4ForCausalLM",
            {
                **GGUF_ATTENTION,
                **GGUF_FUSED,
                "post_self_attn_layernorm": "post_attention_norm",
                "post_mlp_layernorm": "post_ffw_norm",
            },
            config=_gguf,
        ),
    ),
)
