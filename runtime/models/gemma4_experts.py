"""The experts of Gemma 4 26B-A4B: beside the dense block of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import Fields, ModelConfig, MoeConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.dense_and_experts import DenseAndExperts
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.norm import NoNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.models import per_layer
from gristmill.runtime.models.llama import norm


def read_experts(fields: Fields) -> MoeConfig:
    """The experts by config.json; ConfigError: a token has more than there are."""
    experts, top_k = fields.size("num_experts"), fields.size("top_k_experts")
    if top_k > experts:
        raise ConfigError(f"{fields.origin}: top_k_experts = {top_k} is more than the {experts} experts")
    inner = fields.size("moe_intermediate_size")
    moe = MoeConfig(experts, top_k, inner, 0, 1, 1, norm_topk_prob=True, scale=1.0)
    return replace(moe, scoring="softmax", choice_bias=False, activation="gelu_tanh")


def expert_weights(c: ModelConfig, moe: MoeConfig, name: str, source: str) -> Iterator[Weight]:
    """What a layer with experts has for them, with gate before up. The experts of a layer are one tensor, or are read apart (``experts_apart``)."""
    hidden, ffn, experts, router = c.hidden_size, moe.intermediate_size, moe.num_experts, f"{source}.router"
    each = partial(Weight, kind="linear", experts=experts, shard=ShardSpec.experts(experts))
    if c.extra["experts_apart"]:
        place = f"{source}.experts.{{expert}}"
    else:
        place, each = f"{source}.experts", partial(each, stacked=True, rows_first=True)
    yield Weight(f"{name}.router", (f"{router}.proj.weight",), (experts,), hidden, "fp32")
    yield Weight(f"{name}.router.norm", (f"{router}.scale",), (hidden,), None, "fp32")
    yield Weight(f"{name}.experts.scale", (f"{router}.per_expert_scale",), (experts,), None, "fp32")
    yield each(f"{name}.experts.gate_up", (f"{place}.gate_up_proj",), (2 * ffn,), hidden)
    yield each(f"{name}.experts.down", (f"{place}.down_proj",), (hidden,), ffn)
    yield norm(c, f"{name}.experts_norm", f"{source}.pre_feedforward_layernorm_2")
    yield norm(c, f"{name}.dense_post_norm", f"{source}.post_feedforward_layernorm_1")
    yield norm(c, f"{name}.experts_post_norm", f"{source}.post_feedforward_layernorm_2")


class Layer(per_layer.Layer):
    """A layer that may have experts beside its dense block."""

    def __init__(self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> None:
        super().__init__(c, weights, plans, index, rope)
        if c.moe is not None and not isinstance(self.mlp_norm, NoNorm):
            name, before, dense = f"layers.{index}", self.mlp_norm, self.mlp
            self.mlp, self.mlp_norm = DenseAndExperts(c, c.moe, plans, weights, name, before, dense), NoNorm()

    def make_mlp(self, c: ModelConfig, weights: Weights, plans: Plans, index: int) -> MLP:
        """The dense block, in every layer."""
        return MLP(plans, weights, f"layers.{index}", activation=c.activation)


class Gemma4(per_layer.PerLayerDecoder):
    """Gemma4ForCausalLM."""

    make_layer: ClassVar[Callable[..., Any]] = Layer
