"""Rotary position embedding: the tables of a model, shared by its layers."""

from __future__ import annotations

import torch

from gristmill.kernels.rope.cache import RopeParameters, rope_cache
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.plans import Plans

LARGEST_TABLE = 16 << 30
"""Bytes. The longest known context, 10 million tokens with heads of 128, takes a third of it."""


class Rope:
    """Cosines and sines of every position below `ModelConfig.max_position`; of others, kernels return NaN.

    `rot` elements of a head are rotated, in pairs of this `style`, as in problems; `rotates`: whether there is anything to rotate.

    Args:
        parameters: the frequencies; None = a rotation by 0 of one pair, for layers without position, which changes nothing.
    """

    def __init__(self, plans: Plans, config: ModelConfig, parameters: RopeParameters | None) -> None:
        self.rotates = parameters is not None
        self.rot = config.rope_dim if parameters is not None else 2
        self.interleaved = config.rope_interleaved
        self.style = "gptj" if config.rope_interleaved else "neox"
        if (size := 4 * config.max_position * self.rot) > LARGEST_TABLE:
            raise ConfigError(
                f"{config.architecture}: the table of a rotary embedding of {self.rot} elements for {config.max_position} positions would have "
                f"{size / 2**30:.3g} GiB; a max_model_len makes it shorter"
            )
        if parameters is None:
            self.table = torch.tensor([1.0, 0.0], device=plans.device).repeat(config.max_position, 1)
        else:
            self.table = rope_cache(config.rope_dim, config.max_position, parameters, plans.device)


class Ropes:
    """The rotary embedding of each layer: one table for all layers with the same frequencies."""

    def __init__(self, plans: Plans, config: ModelConfig) -> None:
        self._plans, self._config = plans, config
        self._made: dict[tuple[RopeParameters | None, int], Rope] = {}

    def __getitem__(self, layer: int) -> Rope:
        """The one of a layer."""
        parameters, config = self._config.rope_of(layer), self._config.of_layer(layer)
        key = (parameters, config.rope_dim)
        if key not in self._made:
            self._made[key] = Rope(self._plans, config, parameters)
        return self._made[key]
