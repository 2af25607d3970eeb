"""DeepSeek-V3 (arXiv:2412.19437): multi-head latent attention, and a mixture of fine-grained and shared experts.

The multi-token-prediction layer of the checkpoint is for drafting (`gristmill.runtime.speculation.mtp`): the model ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import TIED, Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import Fields, MlaConfig, ModelConfig, MoeConfig, gguf_fields
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.mla import LatentAttention
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.models import Family, llama
from gristmill.runtime.models.llama import GGUF_MLP, Decoder, mlp, norms, outside_layers
from gristmill.runtime.models.qwen import experts

LayerWeights = Callable[[ModelConfig, int], Iterator[Weight]]


def layer_weights(c: ModelConfig, index: int) -> Iterator[Weight]:
    """The weights of a layer. The two projections down to latents are one matrix, gate and up another."""
    name, source = f"layers.{index}", f"model.layers.{index}"
    yield from norms(c, name, source)
    yield from _attention(c, _mla(c), name, f"{source}.self_attn")
    yield from feed_forward(c, name, f"{source}.mlp", index)


def table(c: ModelConfig, layer: LayerWeights = layer_weights) -> WeightTable:
    """Checkpoint tensors -> parameters. Families with other attention give the weights of their `layer`."""
    weights = outside_layers(c)
    for i in range(c.num_layers):
        weights += layer(c, i)
    ignored = [f"model.layers.{c.num_layers + i}.*" for i in range(c.extra["nextn_layers"])]
    ignored.append("model.layers.*.self_attn.rotary_emb.inv_freq")
    return WeightTable(tuple(weights), tuple(ignored), (TIED,) if c.tie_embeddings else ())


def prediction(c: ModelConfig, layer: LayerWeights = layer_weights) -> WeightTable:
    """The prediction layer: a decoder layer after norms and a projection (arXiv:2412.19437, 2.2). Checkpoints repeat embedding and head."""
    hidden, source = c.hidden_size, f"model.layers.{c.num_layers}"
    head = "model.embed_tokens.weight" if c.tie_embeddings else "lm_head.weight"
    weights = (
        Weight("token_norm", (f"{source}.enorm.weight",), (hidden,)),
        Weight("hidden_norm", (f"{source}.hnorm.weight",), (hidden,)),
        Weight("join", (f"{source}.eh_proj",), (hidden,), 2 * hidden, "linear"),
        *layer(c, c.num_layers),
        Weight("norm", (f"{source}.shared_head.norm.weight",), (hidden,)),
    )
    of_model = ["lm_head.*", "model.embed_tokens.*", "model.norm.*", "*.self_attn.rotary_emb.inv_freq"]
    of_model += [f"model.layers.{i}.*" for i in range(c.num_layers)]
    copies = (
        (f"{source}.embed_tokens.weight", "model.embed_tokens.weight"),
        (f"{source}.shared_head.head.weight", head),
    )
    return WeightTable(weights, tuple(of_model), copies)


def _attention(c: ModelConfig, mla: MlaConfig, name: str, source: str) -> Iterator[Weight]:
    heads, latent = c.num_heads, mla.kv_lora_rank
    down: tuple[str, ...] = (f"{source}.kv_a_proj_with_mqa",)
    rows: tuple[int, ...] = (mla.latent_dim,)
    if mla.q_lora_rank:
        down, rows = (f"{source}.q_a_proj", *down), (mla.q_lora_rank, *rows)
        yield Weight(f"{name}.q_norm", (f"{source}.q_a_layernorm.weight",), (mla.q_lora_rank,))
        q_source, q_columns = f"{source}.q_b_proj", mla.q_lora_rank
    else:
        q_source, q_columns = f"{source}.q_proj", c.hidden_size
    q_shard, kv_shard = (
        ShardSpec.head_rows(heads, size=size) for size in (mla.qk_dim, mla.nope_dim + mla.v_dim)
    )
    yield Weight(f"{name}.q", (q_source,), (heads * mla.qk_dim,), q_columns, "linear", shard=q_shard)
    yield Weight(f"{name}.latents", down, rows, c.hidden_size, "linear")
    yield Weight(f"{name}.kv_norm", (f"{source}.kv_a_layernorm.weight",), (latent,))
    kv_rows, inner = heads * (mla.nope_dim + mla.v_dim), heads * mla.v_dim
    yield Weight(f"{name}.kv", (f"{source}.kv_b_proj",), (kv_rows,), latent, "linear", shard=kv_shard)
    out_shard = ShardSpec.head_columns(heads, mla.v_dim)
    yield Weight(f"{name}.out", (f"{source}.o_proj",), (c.hidden_size,), inner, "linear", shard=out_shard)
    if c.attention_bias:
        yield Weight(f"{name}.latents.bias", tuple(f"{part}.bias" for part in down), rows)
        yield Weight(f"{name}.out.bias", (f"{source}.o_proj.bias",), (c.hidden_size,))


def feed_forward(c: ModelConfig, name: str, source: str, index: int) -> Iterator[Weight]:
    """Routed experts with a bias for their choice, and shared ones; gate, up and down in a dense layer."""
    moe = c.moe
    if moe is None or not c.is_moe_layer(index):
        yield from mlp(c, name, source)
        return
    yield from experts(c, name, source, ("gate_proj", "up_proj", "down_proj"))
    if moe.choice_bias:
        bias = f"{source}.gate.e_score_correction_bias"
        yield Weight(f"{name}.router.bias", (bias,), (moe.num_experts,), None, "fp32")
    if moe.num_shared:
        ffn = moe.intermediate_size * moe.num_shared
        yield from mlp(c, f"{name}.shared", f"{source}.shared_experts", ffn)


def _mla(c: ModelConfig) -> MlaConfig:
    if c.mla is None:
        raise ConfigError(
            f"{c.architecture} needs the sizes of multi-head latent attention (kv_lora_rank ...)"
        )
    return c.mla


class Layer(llama.Layer):
    """Latent attention and a feed-forward block, dense in the first layers, experts in the others."""

    def make_attention(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope
    ) -> LatentAttention:
        """Latent attention."""
        return LatentAttention(c, _mla(c), plans, weights, f"layers.{index}", rope, reduce=False)


class DeepseekV3(Decoder):
    """DeepseekV3ForCausalLM."""

    make_layer: ClassVar[Callable[..., Any]] = Layer


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Sizes of latent attention, experts in groups, and the number of prediction layers after the last one."""
    return {
        **latent_config(fields),
        "moe": moe_config(fields),
        "extra": {"nextn_layers": fields.get("num_nextn_predict_layers", int, 0, least=0)},
    }


def latent_config(fields: Fields) -> dict[str, Any]:
    """Multi-head latent attention."""
    mla = MlaConfig(
        q_lora_rank=fields.size("q_lora_rank", None),
        kv_lora_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        v_dim=fields.size("v_head_dim"),
    )
    if mla.rope_dim % 2:
        raise ConfigError(f"{fields.origin}: qk_rope_head_dim must be even, got {mla.rope_dim}")
    return {
        "mla": mla,
        "num_kv_heads": fields.size("num_attention_heads"),
        "head_dim": mla.qk_dim,
        "rope_dim": mla.rope_dim,
        "rope_interleaved": fields.flag("rope_interleave", True),
    }


def moe_config(fields: Fields) -> MoeConfig:
    """Experts in groups, by sigmoid scores with a bias for the choice."""
    scoring = fields.get("scoring_func", str, "sigmoid")
    method = fields.get("topk_method", str, "noaux_tc")
    if (scoring, method) != ("sigmoid", "noaux_tc"):
        raise ConfigError(
            f"{fields.origin}: scoring_func sigmoid with topk_method noaux_tc is supported, got {scoring} with {method}"
        )
    return grouped_experts(fields)


def grouped_experts(fields: Fields) -> MoeConfig:
    """The numbers and sizes of experts in groups."""
    if fields.size("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{fields.origin}: moe_layer_freq must be 1, got {fields.data['moe_layer_freq']}")
    moe = MoeConfig(
        num_experts=fields.size("n_routed_experts"),
        top_k=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("moe_intermediate_size"),
        num_shared=fields.get("n_shared_experts", int, 0, least=0),
        num_groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        first_dense=fields.get("first_k_dense_replace", int, 0, least=0),
    )
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        raise ConfigError(
            f"{fields.origin}: {moe.num_experts} experts in n_group = {moe.num_groups} groups of which topk_group = "
            f"{moe.top_groups} are used: the groups must divide the experts, and no more can be used than there are"
        )
    if moe.top_k > moe.num_experts // moe.num_groups * moe.top_groups:
        raise ConfigError(
            f"{fields.origin}: num_experts_per_tok = {moe.top_k} is more than topk_group groups hold"
        )
    return moe


GGUF_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.{expert}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{expert}.up_proj": "ffn_up_exps",
    "mlp.experts.{expert}.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
"""ggml's names of experts, and of those for every token."""


def gguf_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of config.json about experts from a file's keys."""
    return {
        "n_routed_experts": values.get("expert_count"),
        "n_shared_experts": values.get("expert_shared_count", 0),
        "n_group": gguf_fields(values).get("expert_group_count", int, 0) or 1,
        "topk_group": values.get("expert_group_used_count") or 1,
        "routed_scaling_factor": values.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(values.get("expert_weights_norm", False)),
        "first_k_dense_replace": values.get("leading_dense_block_count", 0),
    }


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. DeepSeek-V2 and V3 have one architecture; scores by sigmoid are V3's."""
    fields, rank = gguf_fields(values), values.get("attention.kv_lora_rank")
    rotated = fields.get("rope.dimension_count", int, 0)
    width = fields.get("attention.key_length_mla", int, 0) or fields.get("attention.key_length", int, 0)
    entries = {
        "num_key_value_heads": None,
        "head_dim": None,
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": values.get("attention.value_length_mla") or values.get("attention.value_length"),
        **gguf_experts(values),
    }
    if values.get("rope.scaling.type") == "yarn":
        # The file has mscale_all_dim alone, of which mscale is the same in DeepSeek's models.
        scale = round(fields.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1, 6)
        entries["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": values.get("rope.scaling.factor"),
            "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
            "mscale": scale,
            "mscale_all_dim": scale,
        }
    if values.get("expert_gating_func", 1) == 2:
        return entries
    method = "group_limited_greedy" if entries["n_group"] > 1 else "greedy"
    return entries | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


GGUF_LATENTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.o_proj": "attn_output",
}

FAMILY = Family(
    name="DeepSeek-V3",
    architectures={"DeepseekV3ForCausalLM": "deepseek_v3"},
    table=table,
    model=DeepseekV3,
    config=config,
    defaults={"DeepseekV3ForCausalLM": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}},
    prediction=prediction,
    gguf=(
        GgufArchitecture(
            "deepseek2",
            "DeepseekV3ForCausalLM",
            GGUF_LATENTS | GGUF_MLP | GGUF_EXPERTS,
            experts=True,
            routed=True,
            config=_gguf,
        ),
    ),
)
