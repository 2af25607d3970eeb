"""What the attention of one layer has for itself, in a model whose layers differ in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerAttention:
    """The attention of a layer, in a model whose layers differ in it.

    Attributes:
        kv_heads: KV heads.
        head_dim, rope_dim: elements of a head, and of those that are rotated.
        source: the layer before it whose keys and values it reads: it projects queries alone; None = it has its own.
        keys_are_values: whether values are what keys are before their norm and rotation, so that there is no projection of values.
    """

    kv_heads: int
    head_dim: int
    rope_dim: int
    source: int | None = None
    keys_are_values: bool = False

    @property
    def projected(self) -> str:
        """As of `ModelConfig`."""
        return "q" if self.source is not None else "qk" if self.keys_are_values else "qkv"
