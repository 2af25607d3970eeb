"""GLM-4.5 to 4.7 (arXiv:2508.06471): grouped-query attention with half of each head rotated, DeepSeek-V3's experts and prediction layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, ModelConfig, gguf_fields
from gristmill.runtime.models import Family, deepseek_v3
from gristmill.runtime.models.llama import GGUF_ATTENTION, GGUF_HEAD_NORMS, GGUF_MLP, Llama, attention, norms
from gristmill.runtime.rope_entries import rotated


def layer_weights(c: ModelConfig, index: int) -> Iterator[Weight]:
    """The weights of a layer."""
    name, source = f"layers.{index}", f"model.layers.{index}"
    yield from norms(c, name, source)
    yield from attention(c, name, f"{source}.self_attn")
    yield from deepseek_v3.feed_forward(c, name, f"{source}.mlp", index)


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    return deepseek_v3.table(c, layer_weights)


def prediction(c: ModelConfig) -> WeightTable:
    """The prediction layer."""
    return deepseek_v3.prediction(c, layer_weights)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Biases of q, k and v under ``attention_bias``, which is about the output too in other families."""
    return {
        "attention_bias": False,
        "qkv_bias": fields.flag("attention_bias", False),
        "rope_dim": rotated(fields, usual=0.5),
        "qk_norm": fields.flag("use_qk_norm", False),
        "moe": deepseek_v3.moe_config(fields),
        "extra": {"nextn_layers": fields.get("num_nextn_predict_layers", int, 0, least=0)},
    }


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. Its layers include that for prediction."""
    fields = gguf_fields(values)
    further = fields.get("nextn_predict_layers", int, 0)
    return {
        **deepseek_v3.gguf_experts(values),
        "num_hidden_layers": fields.get("block_count", int) - further,
        "num_nextn_predict_layers": further,
        "attention_bias": values["q_bias"],
        "use_qk_norm": values["q_norm"],
    }


FAMILY = Family(
    name="GLM-4.5",
    architectures={"Glm4MoeForCausalLM": "glm4_moe"},
    table=table,
    model=Llama,
    config=config,
    defaults={"Glm4MoeForCausalLM": {"rms_norm_eps": 1e-5}},
    prediction=prediction,
    gguf=(
        GgufArchitecture(
            "glm4moe",
            "Glm4MoeForCausalLM",
            {
                **GGUF_HEAD_NORMS,
                **GGUF_ATTENTION,
                **GGUF_MLP,
                **deepseek_v3.GGUF_EXPERTS,
                "post_attention_layernorm": "post_attention_norm",
                "enorm": "nextn.enorm",
                "hnorm": "nextn.hnorm",
                "eh_proj": "nextn.eh_proj",
                "embed_tokens": "nextn.embed_tokens",
                "shared_head.norm": "nextn.shared_head_norm",
                "shared_head.head": "nextn.shared_head_head",
            },
            experts=True,
            routed=True,
            config=_gguf,
        ),
    ),
)
