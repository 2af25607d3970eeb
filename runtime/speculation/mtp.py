"""Drafts from the model's own multi-token-prediction layer (DeepSeek-V3, arXiv:2412.19437, 2.2), which its checkpoint holds.

The layer joins the norm of the next token's embedding with the norm of the hidden state by a projection, h' = M [norm(e); norm(h)],
and is a decoder layer of the model's kind from there. Embedding and logits head are the model's, after a norm of its own. The
state of the first draft is the model's, after its last norm; a further one is the layer's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import memory
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats import open_format
from gristmill.runtime.batch import Batch
from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.embedding import Embedding, LogitsHead
from gristmill.runtime.layers.linear import load_linear
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Ropes
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.loader.load import parse_scheme
from gristmill.runtime.models import Model, families
from gristmill.runtime.speculation import LoadDraft, ProposerSpec
from gristmill.runtime.speculation.hidden_drafts import HiddenStateModel, HiddenStateProposer


class PredictionLayer(HiddenStateModel):
    """The layer after the last of a model, with the embedding and head of `target`, and the weights of the family's table `prediction`."""

    def __init__(self, weights: Weights, plans: Plans, target: Any) -> None:
        c = target.config
        super().__init__(replace(c, num_layers=1), plans)
        self.embedding: Embedding = target.embedding
        self.head: LogitsHead = target.head
        self.token_norm, self.hidden_norm, self.norm = (
            RMSNorm(plans, weights.tensor(name), c.rms_eps) for name in ("token_norm", "hidden_norm", "norm")
        )
        self.join = load_linear(plans, weights, "join")
        self.layer = target.make_layer(c, weights, plans, c.num_layers, Ropes(plans, c)[c.num_layers])

    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """The layer's states [tokens, hidden], before its last norm. `batch.tokens` follow the positions of the states."""
        tokens = len(batch.tokens)
        embedded = self.token_norm(self.embedding(batch.tokens))
        x = self.join(torch.cat((embedded, self.hidden_norm(self.inputs[:tokens])), -1))
        residual = x.new_zeros(x.shape)
        residual += self.layer(x, residual, batch, cache.layers[0])
        self.outputs[:tokens] = residual
        return residual

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] of `forward` -> [rows, vocab]."""
        return self.head(self.norm(hidden), out)


def open_layer(target: Checkpoint, model: str | Path | None) -> LoadDraft:
    """The loader of the prediction layer.

    Raises:
        UsageError: the configuration declares no such layer, or several. CheckpointError: the checkpoint has no such layer.
    """
    config = parse_config(*target.config())
    declared, layers = families()[config.architecture].prediction, config.extra.get("nextn_layers", 0)
    if declared is None or layers != 1:
        raise UsageError(
            f"speculation by 'mtp' needs a model with one multi-token-prediction layer; {target.path}: {config.architecture} with "
            f"num_nextn_predict_layers = {layers}"
        )
    table = declared(config)
    lacking = [name for w in table.weights if w.kind == "kept" for name in w.sources if name not in target]
    if lacking:
        raise CheckpointError(
            f"speculation by 'mtp' reads the multi-token-prediction layer, which the checkpoint was saved without: {target.path} "
            f"has no tensor {lacking[0]}"
        )

    def load(model: Model, policy: Policy | None, quant: str | QuantScheme | torch.dtype | None) -> Model:
        of_model = model.plans
        plans = Plans(of_model.device, of_model.dtype, policy, of_model.block_size)
        stored = None if config.quantization is None else open_format(config.quantization)
        weights = Weights(target, table, plans.dtype, plans.device, parse_scheme(quant), stored)
        with memory.shared_blocks():
            layer = PredictionLayer(weights, plans, model)
        weights.finish()
        return layer

    return load


PROPOSER = ProposerSpec(
    name="mtp",
    summary="the multi-token-prediction layer of the model's own checkpoint (DeepSeek-V3)",
    tokens=1,
    make=HiddenStateProposer,
    open=open_layer,
    shares_blocks=True,
)
