"""MPNet (Song et al., 2020, arXiv:2004.09297): BERT without token types, with a bias of the scores by relative position that all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.models import Family
from gristmill.runtime.models.bert import Bert
from gristmill.runtime.models.encoder_table import LayerModules, encoder_config, encoder_table

NAMES = LayerModules(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
BUCKETS = 32
"""Rows of the table of biases. transformers computes with these, whatever config.json says."""


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. A classifier has a dense layer of its own."""
    heads = {"head": "classifier.dense", "classifier": "classifier.out_proj"}
    made = encoder_table(c, "mpnet", heads, ("mpnet.pooler.*", "lm_head.*"), NAMES)
    # Every rank has all of it, and takes the columns of its heads.
    bias = Weight("position_bias", ("mpnet.encoder.relative_attention_bias.weight",), (BUCKETS,), c.num_heads)
    return replace(made, weights=(*made.weights, bias))


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """BERT's; the first token has position 2, after that of padding, whatever id that has."""
    if (buckets := fields.size("relative_attention_num_buckets", BUCKETS)) != BUCKETS:
        raise ConfigError(f"{fields.origin}: relative_attention_num_buckets must be {BUCKETS}, got {buckets}")
    return encoder_config(fields, architecture, first_position=2, types=False)


FAMILY = Family(
    name="MPNet",
    architectures={f"MPNet{kind}": "mpnet" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")},
    table=table,
    model=Bert,
    config=config,
    base="mpnet",
)
