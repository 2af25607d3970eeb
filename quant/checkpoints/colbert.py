"""Directories of Stanford ColBERT (Khattab and Zaharia, 2020, arXiv:2004.12832): an encoder, and beside its tensors those of a projection."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.safetensors import Entry, SafetensorsCheckpoint

ARCHITECTURE = "HF_ColBERT"
METADATA = "artifact.metadata"
"""The file beside config.json that says how texts are tokenized. By it, or by the architecture, such a directory is known."""
PROJECTION = "linear"
"""The module that maps hidden states to the vectors of tokens. It has no bias."""


class ColbertCheckpoint(SafetensorsCheckpoint):
    """The encoder in such a directory, a `Checkpoint`. The projection is not among its tensors.

    Args:
        architecture: that of the encoder, which config.json names by ``model_type`` alone.
    """

    def __init__(self, path: str | Path, architecture: str) -> None:
        super().__init__(path)
        self.architecture = architecture

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor of the encoder is and what it is."""
        hidden = f"{PROJECTION}.weight"
        return {name: entry for name, entry in super().entries.items() if name != hidden}

    def config(self) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
        """As of a directory with the encoder alone."""
        data, generation, origin = super().config()
        return {**data, "architectures": [self.architecture]}, generation, origin
