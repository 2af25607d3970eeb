"""Drafts from an EAGLE-3 head (Li et al., 2025, arXiv:2503.01840): a decoder layer that was trained on the outputs of three layers of its target.

The outputs are projected to one state, and concatenated with the embedding of the next token: the queries, keys and values of the layer come
from both, 2 · hidden wide. A further draft is drawn from the head's own state. Heads predict a part of the vocabulary: `d2t` holds, for each of
their tokens, the offset to the target's id.

A head is read as its authors and SpecForge publish it: `fc`, `midlayer`, `norm`, `lm_head`, `d2t`. The embedding is the target's, and so is
the logits head of one that has none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.contract import owned
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.attention import Attention
from gristmill.runtime.layers.embedding import Embedding, LogitsHead
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.mlp import MLP
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.models import Model, families
from gristmill.runtime.models.eagle3_head import head_config, table
from gristmill.runtime.speculation import LoadDraft, ProposerSpec
from gristmill.runtime.speculation.hidden_drafts import HiddenStateModel, HiddenStateProposer


class EagleHead(HiddenStateModel):
    """The layer, with the target's embedding. `places` has the target's ids of its tokens, int64 [draft vocab]; None = the same ids."""

    def __init__(
        self, c: ModelConfig, weights: Weights, plans: Plans, target: Any, places: Tensor | None
    ) -> None:
        super().__init__(c, plans)
        self.target_layers = c.extra["layers"]
        self.embedding: Embedding = target.embedding
        self.join = load_linear(plans, weights, "join")
        self.token_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            RMSNorm(plans, weights.tensor(name), c.rms_eps)
            for name in ("token_norm", "hidden_norm", "mlp_norm", "norm")
        )
        self.attention = Attention(c, plans, weights, "layer", Rope(plans, c, c.rope))
        self.mlp = MLP(plans, weights, "layer")
        self.head: LogitsHead = target.head
        if "lm_head.weight" in weights.checkpoint:
            own = weights.vocabulary("head")
            self.head = LogitsHead(plans, owned(own.weight), weights.shard_ranges("head"), own.declared)
        self.places = places

    def states(self, hidden: Tensor) -> Tensor:
        """[rows, 3 · hidden] -> [rows, hidden]."""
        return self.join(hidden)

    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """The layer's states [tokens, hidden], before its last norm."""
        tokens = len(batch.tokens)
        hidden = self.inputs[:tokens]
        normed = self.hidden_norm(hidden)
        residual = normed.clone() if self.config.extra["norm_before_residual"] else hidden.clone()
        embedded = self.token_norm(self.embedding(batch.tokens))
        x = self.attention(torch.cat((embedded, normed), -1), batch, cache.layers[0])
        y = self.mlp(self.mlp_norm.add(x, residual))
        residual += y.x if isinstance(y, PartialSum) else y
        self.outputs[:tokens] = residual
        return residual

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] of `forward` -> [rows, vocab of the target]; tokens that the head does not know are impossible."""
        if self.places is None:
            return self.head(self.norm(hidden), out)
        logits = self.head(self.norm(hidden))
        if out is None:
            out = logits.new_empty(len(logits), self.config.vocab_size)
        return out.fill_(-torch.inf).index_copy_(1, self.places, logits)


def open_head(target: Checkpoint, model: str | Path | None) -> LoadDraft:
    """The loader of a head. Raises as `head_config`; UsageError: the target does not hand over the outputs of its layers;
    CheckpointError: a vocabulary map that is missing or none."""
    if model is None:
        raise UsageError("speculation by an EAGLE-3 head needs its directory: eagle3:DIR")
    head, of_target = open_checkpoint(model), parse_config(*target.config())
    if not hasattr(families()[of_target.architecture].model, "taps"):
        raise UsageError(
            f"EAGLE-3 head {head.path}: {of_target.architecture} does not hand over the outputs of its layers"
        )
    c = head_config(head, of_target)
    places = _places(head, c)
    weights_of = table(c, "lm_head.weight" in head)

    def load(of: Model, policy: Policy | None, quant: str | QuantScheme | torch.dtype | None) -> Model:
        plans = Plans(of.plans.device, of.plans.dtype, policy, of.plans.block_size)
        weights = Weights(head, weights_of, plans.dtype, plans.device)
        reached = replace(c, max_position=of.config.max_position)
        made = EagleHead(reached, weights, plans, of, None if places is None else places.to(plans.device))
        weights.finish()
        return made

    return load


def _places(head: Checkpoint, c: ModelConfig) -> Tensor | None:
    """The target's ids of the head's tokens; None = the same."""
    count = c.extra["draft_vocab"]
    if "d2t" not in head:
        if count != c.vocab_size:
            raise CheckpointError(
                f"{head.path} has no tensor d2t, the target's ids of its {count} tokens, and the target has {c.vocab_size}"
            )
        return None
    if "lm_head.weight" not in head:
        raise CheckpointError(
            f"{head.path} has the vocabulary map d2t, and no tensor lm_head.weight that it is for"
        )
    places = head.read("d2t", (count,), dtypes=(torch.int64,)) + torch.arange(count)
    if int(places.min()) < 0 or int(places.max()) >= c.vocab_size or len(places.unique()) != count:
        raise CheckpointError(
            f"{head.path}: d2t must hold the distance from each of {count} tokens to a different id of the target, below {c.vocab_size}"
        )
    return places


PROPOSER = ProposerSpec(
    name="eagle3",
    summary="an EAGLE-3 head that was trained for the model: eagle3:DIR, eagle3:DIR:TOKENS",
    tokens=3,
    make=HiddenStateProposer,
    takes_model=True,
    open=open_head,
    shares_blocks=True,
)
