"""Configuration and tensors of an EAGLE-3 head (arXiv:2503.01840), which is a layer of Llama's kind with wider queries, keys and values.

It is no model by itself: `gristmill.runtime.speculation.eagle3` drafts by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.models.llama import attention, mlp

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")


def head_config(head: Checkpoint, target: ModelConfig) -> ModelConfig:
    """The configuration of a head for this target. extra: `layers` of the target, `draft_vocab`, `norm_before_residual`.

    Raises:
        ConfigError: config.json is not that of an EAGLE-3 head. UsageError: it is, of another target.
    """
    data, generation, origin = head.config()
    fields = Fields(data, origin)
    names = fields.get("architectures", list)
    if not set(names) & set(ARCHITECTURES):
        raise ConfigError(
            f"{origin}: an EAGLE-3 head has architecture {' or '.join(ARCHITECTURES)}, got {names}"
        )
    c = parse_config({**data, "architectures": ["LlamaForCausalLM"]}, generation, origin)
    if c.num_layers != 1 or c.quantization is not None:
        raise ConfigError(
            f"{origin}: a head of one layer in floats is read, got num_hidden_layers = {c.num_layers}, quantization_config = "
            f"{c.quantization}"
        )
    wide = fields.size("target_hidden_size", c.hidden_size)
    if (wide, c.hidden_size, c.vocab_size) != (target.hidden_size, target.hidden_size, target.vocab_size):
        raise UsageError(
            f"EAGLE-3 head {head.path}: made for a target with hidden size {wide} and {c.vocab_size} tokens, and its own hidden size is "
            f"{c.hidden_size}; the model has {target.hidden_size} and {target.vocab_size}"
        )
    eagle = Fields(fields.get("eagle_config", dict, {}), f"{origin}: eagle_config")
    count = target.num_layers
    layers = eagle.get("eagle_aux_hidden_state_layer_ids", list, None) or [1, count // 2 - 1, count - 4]
    sound = len(set(layers)) == 3 and all(type(i) is int and 0 <= i < count for i in layers)
    if not sound or not eagle.flag("use_aux_hidden_state", True):
        raise UsageError(
            f"EAGLE-3 head {head.path} reads the outputs of the layers {layers}: three different ones of the model's {count} are needed"
        )
    extra = {
        "layers": tuple(layers),
        "draft_vocab": fields.size("draft_vocab_size", c.vocab_size),
        "norm_before_residual": fields.flag("norm_before_residual", False),
    }
    return replace(c, extra=extra)


def table(c: ModelConfig, has_head: bool) -> WeightTable:
    """Tensors of a head -> parameters. `has_head` says whether it has a logits head of its own."""
    hidden = c.hidden_size
    weights = [
        Weight("join", ("fc",), (hidden,), 3 * hidden, "linear"),
        Weight("token_norm", ("midlayer.input_layernorm.weight",), (hidden,)),
        Weight("hidden_norm", ("midlayer.hidden_norm.weight",), (hidden,)),
        *_attention(c),
        Weight("mlp_norm", ("midlayer.post_attention_layernorm.weight",), (hidden,)),
        *mlp(c, "layer", "midlayer.mlp"),
        Weight("norm", ("norm.weight",), (hidden,)),
    ]
    if has_head:
        weights.append(Weight("head", ("lm_head.weight",), (c.extra["draft_vocab"],), hidden))
    return WeightTable(tuple(weights), ("d2t", "t2d", "embed_tokens.weight", "*.rotary_emb.inv_freq"))


def _attention(c: ModelConfig) -> Iterator[Weight]:
    for weight in attention(c, "layer", "midlayer.self_attn"):
        yield replace(weight, columns=2 * c.hidden_size) if weight.target == "layer.qkv" else weight
