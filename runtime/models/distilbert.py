"""DistilBERT (Sanh et al., 2019, arXiv:1910.01108): BERT with half of the layers, without token types, and with names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.models import Family
from gristmill.runtime.models.bert import Bert
from gristmill.runtime.models.encoder_table import LayerModules, encoder_config, encoder_table

NAMES = LayerModules(
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters."""
    heads = {"head": "pre_classifier", "classifier": "classifier"}
    return encoder_table(c, "distilbert", heads, ("vocab_*",), NAMES)


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """BERT's, whose epsilon is fixed. Positions of sines are in the checkpoint as learned ones are."""
    return encoder_config(fields, architecture, types=False, head="relu")


FAMILY = Family(
    name="DistilBERT",
    architectures={
        f"DistilBert{kind}": "distilbert" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
    table=table,
    model=Bert,
    config=config,
    base="distilbert",
    entries={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
)
