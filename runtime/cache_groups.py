"""The layers of a model in groups that share block tables (`kv_cache.groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """layers: their indices in the model. window: keys that a query sees, its own included; 0 = all."""

    layers: tuple[int, ...]
    window: int = 0


def make_groups(windows: Sequence[int]) -> tuple[KVGroup, ...]:
    """The groups of layers with these windows, full attention first: each as large as the rarest kind, the last of a kind may be smaller.

    One group without a window if all layers are of a kind: a prefix is found by the blocks of full attention.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if len(kinds) == 1 or 0 not in kinds:
        return (KVGroup(tuple(range(len(windows)))),)
    size = min(map(len, kinds.values()))
    return tuple(
        KVGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items())
        for start in range(0, len(layers), size)
    )
