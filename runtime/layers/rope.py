"""Rotary position embedding: the table of a model, shared by its layers."""

from __future__ import annotations

from gristmill.kernels.rope.cache import rope_cache
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.plans import Plans


class Rope:
    """Cosines and sines of every position. `rot` elements of a head are rotated, in pairs of this `style`, as in problems."""

    def __init__(self, plans: Plans, config: ModelConfig) -> None:
        self.rot = config.rope_dim
        self.interleaved = config.rope_interleaved
        self.style = "gptj" if config.rope_interleaved else "neox"
        self.table = rope_cache(config.rope_dim, config.max_position, config.rope, plans.device)
