"""What follows the encoder in a directory of Stanford ColBERT: the projection, and artifact.metadata, which says how texts are tokenized."""

from __future__ import annotations

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.colbert import METADATA, PROJECTION, ColbertCheckpoint
from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.runtime.config import Fields
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.pooling.modules import Dense, LateInteraction, Modules

KNOWN = {"similarity": "cosine", "interaction": "colbert"}
"""Entries with which the sum of the best products is the score."""


def read_colbert(checkpoint: Checkpoint) -> Modules | None:
    """The modules of such a directory; None if it is none.

    The lengths count all tokens of a text, the marker and those that the tokenizer adds included. Entries that are missing, or the whole
    file, are as ColBERT has them.

    Raises:
        ConfigError: an entry that cannot be read, or with which scores are computed otherwise. CheckpointError: there is no projection, or
            it has another size than ``dim``.
    """
    if not isinstance(checkpoint, ColbertCheckpoint):
        return None
    file, folder = checkpoint.path / METADATA, checkpoint.path
    fields = Fields(read_json(file) if file.is_file() else {}, str(file))
    for entry, only in KNOWN.items():
        if (given := fields.get(entry, str, only)) != only:
            raise ConfigError(f"{file}: {entry} must be {only}, got {given!r}")
    _, (outputs, inputs) = SafetensorsCheckpoint(folder).spec(f"{PROJECTION}.weight")
    if (dim := fields.size("dim", outputs)) != outputs:
        raise ConfigError(f"{file}: dim is {dim}, and {PROJECTION}.weight has {outputs} rows")
    usual = LateInteraction()
    late = LateInteraction(
        query_prefix=fields.get("query_token_id", str, "[unused0]"),
        document_prefix=fields.get("doc_token_id", str, "[unused1]"),
        query_length=fields.size("query_maxlen", 32),
        document_length=fields.size("doc_maxlen", 220),
        attend=fields.flag("attend_to_mask_tokens", False),
        skipped=usual.skipped if fields.flag("mask_punctuation", True) else (),
    )
    return Modules(None, (Dense(folder, inputs, outputs, False, "none"),), similarity="MaxSim", late=late)
