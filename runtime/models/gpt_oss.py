"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): attention sinks, a sliding window in every second layer, experts in MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, MoeConfig, layer_windows
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.models import Family, llama
from gristmill.runtime.models.llama import GGUF_ATTENTION, Llama, decoder_table
from gristmill.runtime.rope_entries import need_rope

ALPHA = 1.702
"""Alpha of the experts' activation, which the configuration does not state."""
PATTERN = (SLIDING, FULL)
"""Layers without ``layer_types``: every second one has a window."""


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
        if c.extra["experts_apart"]:
            yield from _apart(moe, hidden, to, each)
            return
        yield stacked(f"{to}.gate_up", (f"{each}.gate_up_proj",), (2 * ffn,), hidden, interleaved=True)
        bias = (f"{each}.gate_up_proj_bias",)
        yield Weight(f"{to}.gate_up.bias", bias, (experts,), 2 * ffn, shard=rows, interleaved=True)
        yield stacked(f"{to}.down", (f"{each}.down_proj",), (hidden,), ffn)
        yield Weight(f"{to}.down.bias", (f"{each}.down_proj_bias",), (experts,), hidden, shard=rows)

    base = decoder_table(c, feed_forward)
    return replace(base, ignored=(*base.ignored, "model.layers.*.self_attn.rotary_emb.*"))


def _apart(moe: MoeConfig, hidden: int, to: str, each: str) -> Iterator[Weight]:
    """The experts of GGUF files, each by itself, with gate and up as matrices of their own."""
    count, ffn = moe.num_experts, moe.intermediate_size
    by_expert = partial(Weight, experts=count, shard=ShardSpec.experts(count))
    gate, up, down = (f"{each}.{{expert}}.{part}_proj" for part in ("gate", "up", "down"))
    yield by_expert(f"{to}.gate_up", (gate, up), (ffn, ffn), hidden, "linear")
    yield by_expert(f"{to}.gate_up.bias", (f"{gate}.bias", f"{up}.bias"), (ffn, ffn))
    yield by_expert(f"{to}.down", (down,), (hidden,), ffn, "linear")
    yield by_expert(f"{to}.down.bias", (f"{down}.bias",), (hidden,))


def _moe(c: ModelConfig) -> MoeConfig:
    if c.moe is None:
        raise ConfigError(f"{c.architecture} has experts, and the configuration none")
    return c.moe


class Layer(llama.Layer):
    """Experts with a clamped activation in every layer."""

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
    values = {
        "moe": MoeConfig.most_probable(fields, count, inner),
        "attention_bias": fields.flag("attention_bias", True),
        "windows": layer_windows(fields, fields.size("sliding_window", 128), PATTERN),
        "extra": {
            "swiglu_limit": fields.number("swiglu_limit", 7.0),
            "experts_apart": fields.flag("experts_apart", False),
        },
    }
    need_rope(fields)
    return values


def _gguf(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of config.json from a file's keys. No key says that yarn's range is in parts of dimensions, as it is for all of gpt-oss."""
    rope = values["rope_scaling"]
    return {
        "sliding_window": values.get("attention.sliding_window"),
        "experts_apart": True,
        "rope_scaling": {**rope, "truncate": False} if rope else {"rope_type": "default"},
    }


FAMILY = Family(
    name="gpt-oss",
    architectures={"GptOssForCausalLM": "gpt_oss"},
    table=table,
    model=GptOss,
    config=config,
    defaults={"GptOssForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 150000.0}},
    gguf=(
        GgufArchitecture(
            "gpt-oss",
            "GptOssForCausalLM",
            {
                **GGUF_ATTENTION,
                "post_attention_layernorm": "post_attention_norm",
                "self_attn.sinks": "attn_sinks.weight",
                "mlp.router": "ffn_gate_inp",
                "mlp.experts.{expert}.gate_proj": "ffn_gate_exps",
                "mlp.experts.{expert}.up_proj": "ffn_up_exps",
                "mlp.experts.{expert}.down_proj": "ffn_down_exps",
            },
            experts=True,
            config=_gguf,
        ),
    ),
)
