"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Llama with experts in every layer, two of them a token."""

from __future__ import annotations

from gristmill.runtime.loader.config import ModelConfig
from gristmill.runtime.loader.weights import WeightTable
from gristmill.runtime.models.llama import decoder_table
from gristmill.runtime.models.qwen import experts


def table(c: ModelConfig) -> WeightTable:
    """Checkpoint tensors -> parameters; w1 is the gate, w3 up, w2 down."""
    return decoder_table(
        c, lambda name, source, layer: experts(c, name, f"{source}.block_sparse_moe", ("w1", "w3", "w2"))
    )
