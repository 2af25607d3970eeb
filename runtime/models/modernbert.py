"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): a pre-norm encoder with rotary embeddings, GeGLU, and windows in two of three layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from gristmill.quant.checkpoints.shards import ShardSpec
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import FULL, SLIDING, Fields, ModelConfig, activation, layer_windows
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.encoder import ClassifierHead, PreNormLayer
from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.norm import load_norm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Ropes
from gristmill.runtime.models import Family
from gristmill.runtime.models.encoder_table import head_shards
from gristmill.runtime.rope_entries import ropes_by_kind
from gristmill.runtime.sequences import Sequences


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    h, ffn, biases = c.hidden_size, c.intermediate_size, c.extra["biases"]

    by_heads, of_heads = head_shards(c)

    def with_bias(
        target: str, module: str, rows: int, columns: int | None, kind: str, shard: ShardSpec | None = None
    ) -> Iterator[Weight]:
        source = module if columns else f"{module}.weight"
        yield Weight(target, (source,), (rows,), columns, "linear" if columns else "kept", shard=shard)
        if biases[kind]:
            of_bias = None if shard is None or shard.dim == "columns" else shard
            yield Weight(f"{target}.bias", (f"{module}.bias",), (rows,), shard=of_bias)

    weights = [
        Weight("embedding", ("model.embeddings.tok_embeddings.weight",), (c.vocab_size,), h),
        *with_bias("embedding_norm", "model.embeddings.norm", h, None, "norm"),
        *with_bias("norm", "model.final_norm", h, None, "norm"),
    ]
    for i in range(c.num_layers):
        name, source = f"layers.{i}", f"model.layers.{i}"
        if i:
            weights += with_bias(f"{name}.attention_norm", f"{source}.attn_norm", h, None, "norm")
        weights += with_bias(f"{name}.qkv", f"{source}.attn.Wqkv", 3 * h, h, "attention", by_heads)
        weights += with_bias(f"{name}.out", f"{source}.attn.Wo", h, h, "attention", of_heads)
        weights += with_bias(f"{name}.mlp_norm", f"{source}.mlp_norm", h, None, "norm")
        weights += with_bias(
            f"{name}.gate_up", f"{source}.mlp.Wi", 2 * ffn, h, "mlp", ShardSpec.rows(ffn, ffn)
        )
        weights += with_bias(f"{name}.down", f"{source}.mlp.Wo", h, ffn, "mlp", ShardSpec.columns(ffn))
    if c.labels:
        weights += with_bias("head", "head.dense", h, h, "head")
        weights += with_bias("head.norm", "head.norm", h, None, "norm")
        weights += with_bias("classifier", "classifier", c.labels, h, "classifier")
    return WeightTable(tuple(weights), () if c.labels else ("head.*", "decoder.*"))


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """LayerNorm, two kinds of layers with frequencies of their own, and which modules have biases."""
    usual = [FULL] + [SLIDING] * (fields.size("global_attn_every_n_layers", 3) - 1)
    pooling = fields.get("classifier_pooling", str, "cls")
    if pooling not in ("cls", "mean"):
        raise ConfigError(f"{fields.origin}: classifier_pooling must be cls or mean, got {pooling!r}")
    biases = {kind: fields.flag(f"{kind}_bias", False) for kind in ("norm", "attention", "mlp")}
    biases |= {"head": fields.flag("classifier_bias", False), "classifier": True}
    thetas = fields.number("global_rope_theta", 160000.0), fields.number("local_rope_theta", 10000.0)
    return {
        "norm": "layer",
        "rms_eps": fields.number("norm_eps", 1e-5),
        "activation": activation(fields, "hidden_activation"),
        # Keys on each side, where decoders have the number of all.
        "windows": layer_windows(fields, fields.get("local_attention", int, 128, least=2) // 2, usual),
        **ropes_by_kind(fields, usual, *thetas),
        "extra": {
            "biases": biases,
            "pooling": pooling,
            "activation": activation(fields, "classifier_activation"),
        },
    }


class ModernBert:
    """ModernBertModel and ModernBertForSequenceClassification: an `Encoder`."""

    def __init__(self, config: ModelConfig, weights: Weights, plans: Plans) -> None:
        self.config, self.plans = config, plans
        self.embedding = weights.tensor("embedding")
        plans.own(self.embedding)
        self.embedding_norm = load_norm(plans, weights, "embedding_norm", config)
        ropes = Ropes(plans, config)
        self.layers = [PreNormLayer(config, weights, plans, i, ropes[i]) for i in range(config.num_layers)]
        self.norm = load_norm(plans, weights, "norm", config)
        self.head = None
        if config.labels:
            self.head = ClassifierHead(
                config, plans, weights, config.extra["activation"], config.extra["pooling"]
            )

    def encode(self, batch: Sequences) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm."""
        embedded = self.embedding_norm(self.embedding[batch.tokens])
        residual = embedded.new_zeros(embedded.shape)
        x: Tensor | PartialSum = embedded
        for layer in self.layers:
            x = layer(x, residual, batch)
        return self.norm.add(x, residual)

    def classify(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """Logits [sequences, labels] of what `encode` returned."""
        if self.head is None:
            raise ConfigError(f"{self.config.architecture} has no classifier")
        return self.head(hidden, batch)


FAMILY = Family(
    name="ModernBERT",
    architectures={
        f"ModernBert{kind}": "modernbert" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
    table=table,
    model=ModernBert,
    config=config,
)
