"""What encoders with a norm after each block (BERT and those after it) have in common: checkpoint tensors, and entries of config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.runtime.config import Fields, ModelConfig, activation
from gristmill.runtime.errors import ConfigError


@dataclass(frozen=True)
class LayerModules:
    """The modules of a layer in a checkpoint, and `layers`, the module of all layers. The defaults are BERT's names."""

    layers: str = "encoder.layer"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


def encoder_table(
    c: ModelConfig,
    base: str,
    heads: Mapping[str, str],
    ignored: tuple[str, ...] = (),
    names: LayerModules | None = None,
) -> WeightTable:
    """Checkpoint tensors -> parameters. Layers are sharded by heads and by the inner size, as those of decoders; the rest is on every rank.

    Args:
        base: names the encoder in a checkpoint that has a head.
        heads: the linear layers of a classifier -> their modules; without the one named ``classifier`` there is none.
        names: the modules of a layer; None = BERT's.
    """
    h, ffn, place, names = c.hidden_size, c.intermediate_size, f"{base}.embeddings", names or LayerModules()
    by_heads, of_heads = head_shards(c)
    positions, types = c.max_position + c.extra["first_position"], c.extra["types"]
    weights = [
        Weight("embedding", (f"{place}.word_embeddings.weight",), (c.vocab_size,), h),
        Weight("positions", (f"{place}.position_embeddings.weight",), (positions,), h),
        *norm("norm", f"{place}.LayerNorm", h),
    ]
    if types:
        weights.append(Weight("types", (f"{place}.token_type_embeddings.weight",), (types,), h))
    for i in range(c.num_layers):
        name, source = f"layers.{i}", f"{base}.{names.layers}.{i}"
        qkv = tuple(f"{source}.{part}" for part in names.qkv)
        weights += [
            *linear(f"{name}.qkv", qkv, (h, h, h), h, by_heads),
            *linear(f"{name}.out", (f"{source}.{names.out}",), (h,), h, of_heads),
            *norm(f"{name}.attention_norm", f"{source}.{names.attention_norm}", h),
            *linear(f"{name}.up", (f"{source}.{names.up}",), (ffn,), h, ShardSpec.rows(ffn)),
            *linear(f"{name}.down", (f"{source}.{names.down}",), (h,), ffn, ShardSpec.columns(ffn)),
            *norm(f"{name}.mlp_norm", f"{source}.{names.mlp_norm}", h),
        ]
    if c.labels:
        for name, module in heads.items():
            weights += linear(name, (module,), (c.labels if name == "classifier" else h,), h)
    return WeightTable(tuple(weights), (f"{place}.position_ids", f"{place}.token_type_ids", *ignored))


def norm(target: str, module: str, size: int) -> Iterator[Weight]:
    """A norm with a bias."""
    yield Weight(target, (f"{module}.weight",), (size,))
    yield Weight(f"{target}.bias", (f"{module}.bias",), (size,))


def head_shards(c: ModelConfig) -> tuple[ShardSpec, ShardSpec]:
    """How q, k and v are sharded, and the output of attention."""
    heads = (c.num_heads,) * 3
    return ShardSpec.head_rows(*heads, size=c.head_dim), ShardSpec.head_columns(c.num_heads, c.head_dim)


def linear(
    target: str, modules: tuple[str, ...], rows: tuple[int, ...], columns: int, shard: ShardSpec | None = None
) -> Iterator[Weight]:
    """Modules with biases, as one linear layer. The bias of a layer that is sharded by columns is added after the sum over the ranks."""
    yield Weight(target, modules, rows, columns, "linear", shard=shard)
    of_bias = None if shard is None or shard.dim == "columns" else shard
    yield Weight(f"{target}.bias", tuple(f"{module}.bias" for module in modules), rows, shard=of_bias)


def encoder_config(
    fields: Fields, architecture: str, first_position: int = 0, types: bool = True, head: str = "tanh"
) -> Mapping[str, Any]:
    """LayerNorm, and exact gelu if no other function is named.

    Args:
        first_position: that of the first token among the learned ones.
        types: whether there are embeddings of token types.
        head: the function between the two layers of a classifier, one of `layers.encoder.ACTIVATIONS`.

    Raises:
        ConfigError: the model is used as a decoder, or has positions of another kind.
    """
    if (kind := fields.get("position_embedding_type", str, None) or "absolute") != "absolute":
        raise ConfigError(f"{fields.origin}: position_embedding_type must be absolute, got {kind!r}")
    if fields.flag("is_decoder", False) or fields.flag("add_cross_attention", False):
        raise ConfigError(f"{fields.origin}: {architecture} is read as an encoder; is_decoder must be false")
    return {
        "norm": "layer",
        "rms_eps": fields.number("layer_norm_eps", 1e-12),
        "activation": activation(fields),
        "max_position": fields.size("max_position_embeddings") - first_position,
        "extra": {
            "types": fields.size("type_vocab_size", 2) if types else 0,
            "first_position": first_position,
            "head": head,
        },
    }
