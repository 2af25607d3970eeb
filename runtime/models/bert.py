"""BERT (Devlin et al., 2018, arXiv:1810.04805): an encoder with learned positions, and a norm after each block."""

from __future__ import annotations

from torch import Tensor

from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.encoder import ClassifierHead, LearnedEmbedding, PostNormLayer
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.position_bias import load_position_bias
from gristmill.runtime.models import Family
from gristmill.runtime.models.encoder_table import encoder_config, encoder_table
from gristmill.runtime.sequences import Sequences


class Bert:
    """BertModel and BertForSequenceClassification, and encoders whose layers are alike: an `Encoder`."""

    def __init__(self, config: ModelConfig, weights: Weights, plans: Plans) -> None:
        self.config, self.plans = config, plans
        self.embedding = LearnedEmbedding(config, plans, weights)
        bias = load_position_bias(config, plans, weights)
        self.layers = [PostNormLayer(config, weights, plans, i, bias) for i in range(config.num_layers)]
        self.head = None
        if config.labels:
            self.head = ClassifierHead(config, plans, weights, config.extra["head"])

    def encode(self, batch: Sequences) -> Tensor:
        """Hidden states [tokens, hidden]."""
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def classify(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """Logits [sequences, labels] of what `encode` returned."""
        if self.head is None:
            raise ConfigError(f"{self.config.architecture} has no classifier")
        return self.head(hidden, batch)


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters. The dense layer over the first token is the classifier's."""
    heads = {"head": "bert.pooler.dense", "classifier": "classifier"}
    return encoder_table(c, "bert", heads, () if c.labels else ("bert.pooler.*", "cls.*"))


FAMILY = Family(
    name="BERT",
    architectures={
        "BertModel": "bert",
        "BertForMaskedLM": "bert",
        "BertForSequenceClassification": "bert",
    },
    table=table,
    model=Bert,
    config=encoder_config,
    base="bert",
)
