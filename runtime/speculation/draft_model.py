"""The draft model of an engine: loaded beside the target, with the same tokenizer, which is checked before any weight is read."""

from __future__ import annotations

from pathlib import Path

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.checkpoint import Checkpoint, NoTokenizerError
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.loader.open import open_checkpoint
from gristmill.runtime.models import Model
from gristmill.runtime.speculation import LoadDraft


def check_draft_model(target: str | Path | Checkpoint, draft: str | Path) -> Checkpoint:
    """The draft's checkpoint; UsageError unless it is a model whose token ids mean what the target's do.

    Their tokenizers have the same tokens with the same ids; where neither has a tokenizer, their vocabularies have the same size.
    """
    target, opened = open_checkpoint(target), open_checkpoint(draft)
    try:
        opened.config()
    except ConfigError as error:
        raise ConfigError(f"draft model: {error}") from error
    ours, theirs = _vocabulary(target), _vocabulary(opened)
    if ours is None and theirs is None:
        sizes = [parse_config(*checkpoint.config()).vocab_size for checkpoint in (target, opened)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"draft model {opened.path}: its vocabulary has {sizes[1]} tokens, that of {target.path} {sizes[0]}"
            )
        return opened
    if ours is None or theirs is None:
        raise UsageError(
            f"draft model {opened.path}: its tokenizer cannot be compared with that of {target.path}: one of them has none"
        )
    if ours != theirs:
        differing = sum(1 for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise UsageError(
            f"draft model {opened.path}: its tokenizer is not that of {target.path}: {differing} tokens have another id or are "
            "missing in one of them"
        )
    return opened


def open_draft_model(target: Checkpoint, draft: str | Path | None) -> LoadDraft:
    """The loader of a draft model: on the target's device, in its dtype, as stored, with cache blocks of the same size; its KV cache is
    not quantized. Raises as `check_draft_model`."""
    if draft is None:
        raise UsageError("speculation by a draft model needs its directory: draft:DIR")
    checkpoint = check_draft_model(target, draft)

    def load(model: Model, policy: Policy | None, quant: str | QuantScheme | torch.dtype | None) -> Model:
        plans = model.plans
        return load_model(checkpoint, plans.dtype, None, plans.device, policy, plans.block_size)

    return load


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Token -> id; None without a tokenizer."""
    try:
        tokens: dict[str, int] = checkpoint.tokenizer().get_vocab(with_added_tokens=True)
    except NoTokenizerError:
        return None
    return tokens
