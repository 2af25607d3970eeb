"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): attention sinks, a sliding window in every second layer, experts in MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import Fields, ModelConfig, MoeConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.attention import Attention
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.models import Family, llama
from gristmill.runtime.models.llama import Llama, decoder_table

ALPHA = 1.702
"""Alpha of the experts' activation, which the configuration does not state."""


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. Gate and up rows of an expert are stored in turn, and are parted as they are read."""
    moe = _moe(c)
    hidden, ffn, experts = c.hidden_size, moe.intermediate_size, moe.num_experts
    sinks, rows = ShardSpec.head_rows(c.num_heads, size=1), ShardSpec.rows(experts, unit=1)
    stacked = partial(Weight, kind="linear", experts=experts, stacked=True, shard=ShardSpec.experts(experts))

    def feed_forward(name: str, source: str, layer: int) -> Iterator[Weight]:
        router, each, to = f"{source}.mlp.router", f"{source}.mlp.experts", f"{name}.experts"
        heads = (c.num_heads,)
        yield Weight(f"{name}.sinks", (f"{source}.self_attn.sinks",), heads, None, "fp32", shard=sinks)
        yield Weight(f"{name}.router", (f"{router}.weight",), (experts,), hidden, "fp32")
        yield Weight(f"{name}.router.bias", (f"{router}.bias",), (experts,), None, "fp32")
        yield stacked(f"{to}.gate_up", (f"{each}.gate_up_proj",), (2 * ffn,), hidden, interleaved=True)
        bias = (f"{each}.gate_up_proj_bias",)
        yield Weight(f"{to}.gate_up.bias", bias, (experts,), 2 * ffn, shard=rows, interleaved=True)
        yield stacked(f"{to}.down", (f"{each}.down_proj",), (hidden,), ffn)
        yield Weight(f"{to}.down.bias", (f"{each}.down_proj_bias",), (experts,), hidden, shard=rows)

    base = decoder_table(c, feed_forward)
    return replace(base, ignored=(*base.ignored, "model.layers.*.self_attn.rotary_emb.*"))


def _moe(c: ModelConfig) -> MoeConfig:
    if c.moe is None:
        raise ConfigError(f"{c.architecture} has experts, and the configuration none")
    return c.moe


class Layer(llama.Layer):
    """Attention with sinks, windowed or not, and experts with a clamped activation."""

    def make_attention(
        self, c: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope
    ) -> Attention:
        """Attention in the layer's window."""
        return Attention(c, plans, weights, f"layers.{index}", rope, c.windows[index], reduce=False)

    def make_mlp(self, c: ModelConfig, weights: Weights, plans: Plans, index: int) -> MixtureOfExperts:
        """Experts in every layer."""
        clamp = (ALPHA, c.extra["swiglu_limit"])
        return MixtureOfExperts(_moe(c), plans, weights, f"layers.{index}", reduce=False, clamp=clamp)


class GptOss(Llama):
    """GptOssForCausalLM."""

    make_layer: ClassVar[Callable[..., Any]] = Layer


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """Experts, windows, biases, and the clamp limit of the experts' activation."""
    count, inner = fields.size("num_local_experts"), fields.size("intermediate_size")
    return {
        "moe": MoeConfig.most_probable(fields, count, inner),
        "attention_bias": fields.flag("attention_bias", True),
        "windows": _windows(fields),
        "extra": {"swiglu_limit": fields.number("swiglu_limit", 7.0)},
    }


def _windows(fields: Fields) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention; by default every second layer has one."""
    window, layers = fields.size("sliding_window", 128), fields.size("num_hidden_layers")
    types = fields.get("layer_types", list, None) or ["sliding_attention", "full_attention"] * layers
    known = {"sliding_attention": window, "full_attention": 0}
    if len(types) < layers or any(kind not in known for kind in types):
        raise ConfigError(
            f"{fields.origin}: layer_types must give each of {layers} layers one of {', '.join(known)}, got {types!r}"
        )
    return tuple(known[kind] for kind in types[:layers])


FAMILY = Family(
    name="gpt-oss",
    architectures={"GptOssForCausalLM": "gpt_oss"},
    table=table,
    model=GptOss,
    config=config,
)
