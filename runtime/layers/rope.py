"""Rotary position embedding: the table of a model, and the rotation of queries and keys in place."""

from __future__ import annotations

from torch import Tensor

from gristmill.kernels.rope.cache import rope_cache
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.plans import Plans


class Rope:
    """Cosines and sines of every position, made once and shared by the layers."""

    def __init__(self, plans: Plans, config: ModelConfig) -> None:
        self.interleaved = config.rope_interleaved
        self.plan = plans.bind(
            "rotary_embedding",
            hq=config.num_heads,
            hk=config.num_kv_heads if config.mla is None else 1,
            d=config.head_dim if config.mla is None else config.rope_dim,
            rot=config.rope_dim,
            style="gptj" if config.rope_interleaved else "neox",
            x=plans.x,
        )
        self.table = rope_cache(config.rope_dim, config.max_position, config.rope, plans.device)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        """q [tokens, heads, D] and k [tokens, kv_heads, D], in place; both may be views of one projection."""
        self.plan(q, k, positions, self.table, self.interleaved)
