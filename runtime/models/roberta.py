"""RoBERTa (Liu et al., 2019, arXiv:1907.11692) and XLM-R (Conneau et al., 2019, arXiv:1911.02116): BERT with positions after the padding id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.models import Family
from gristmill.runtime.models.bert import Bert
from gristmill.runtime.models.encoder_table import encoder_config, encoder_table


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. A classifier has a dense layer of its own."""
    heads = {"head": "classifier.dense", "classifier": "classifier.out_proj"}
    return encoder_table(c, "roberta", heads, ("roberta.pooler.*", "lm_head.*"))


def config(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """BERT's; the position of the first token is that after the padding id."""
    padding = fields.get("pad_token_id", int, 1, least=0)
    return encoder_config(fields, architecture, padding + 1)


KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
FAMILY = Family(
    name="RoBERTa",
    architectures={f"Roberta{kind}": "roberta" for kind in KINDS}
    | {f"XLMRoberta{kind}": "xlm-roberta" for kind in KINDS}
    | {f"Camembert{kind}": "camembert" for kind in KINDS},
    table=table,
    model=Bert,
    config=config,
    base="roberta",
)
