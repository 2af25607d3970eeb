"""Where the keys and values of each layer are in the memory of the paged cache.

The memory is a number of places of one size, that of the layer with the widest keys. Narrower layers lie side by side in a place, as many of one
width as fit: one after another within each block, so that a block has its bytes to itself whichever layers use it. A layer that reads the keys
and values of another one has no place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.kv_cache.groups import KVGroup


class Place(NamedTuple):
    """The part of each block of place `number` that a layer has: the `part`-th of its own size."""

    number: int
    part: int


class Places:
    """The places of the layers of a model. Those of different groups are the same memory, as each has blocks of its own.

    Attributes:
        count: places.
        width: elements of a token's keys, and of its values, in a place.
        heads: scales of a token's keys, and of its values, in a place, if there is one per token and head.
        of: the place of each layer that has one.
    """

    def __init__(self, config: ModelConfig, groups: Sequence[KVGroup] = ()) -> None:
        layers = range(config.num_layers)
        # Elements and heads of a token: layers that lie side by side are alike in both.
        sizes = {
            layer: (config.kv_width(layer), config.of_layer(layer).num_kv_heads)
            for layer in layers
            if config.kv_source(layer) == layer
        }
        self.count, self.width = 0, max(width for width, _ in sizes.values())
        self.heads = max(self.width // width * heads for width, heads in sizes.values())
        self.of: dict[int, Place] = {}
        for group in groups or (KVGroup(tuple(layers)),):
            alike: dict[tuple[int, int], list[int]] = {}
            for layer in group.layers:
                if layer in sizes:
                    alike.setdefault(sizes[layer], []).append(layer)
            used = 0
            for (width, _), same in alike.items():
                fit = self.width // width
                for place, layer in enumerate(same):
                    self.of[layer] = Place(used + place // fit, place % fit)
                used += cdiv(len(same), fit)
            self.count = max(self.count, used)
