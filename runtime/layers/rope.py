"""Rotary position embedding: the table of a model, and the rotation of queries and keys in place."""

from __future__ import annotations

from torch import Tensor

from gristmill.kernels.rope.cache import rope_cache
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.plans import Plans


class Rope:
    """Cosines and sines of every position, made once and shared by the layers."""

    def __init__(self, plans: Plans, config: ModelConfig) -> None:
        self.plans = plans
        self.dim = config.rope_dim
        self.interleaved = config.rope_interleaved
        self.table = rope_cache(config.rope_dim, config.max_position, config.rope, plans.device)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        """q [tokens, heads, D] and k [tokens, kv_heads, D], both views of one projection if need be, in place."""
        style = "gptj" if self.interleaved else "neox"
        problem = (
            f"hq={q.shape[1]},hk={k.shape[1]},d={q.shape[2]},rot={self.dim},style={style},x={self.plans.x}"
        )
        self.plans.bind("rotary_embedding", problem)(q, k, positions, self.table, self.interleaved)
