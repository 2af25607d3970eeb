"""Groups of layers whose caches hold the same tokens: full attention keeps all of a request, a sliding window its last ones.

Every group has as many layers of the same geometry, so a block has the same bytes in each, and one pool of ids serves all. A request
has a block table per group. One list holds them, interleaved: its entry ``index * groups + group`` is the block of the tokens
``index * block_size`` and on. A place whose block was given back holds the null block, ``num_blocks``, which is never written.

A layer with a state of constant size would be a group with another answer of `first_needed`. Groups are vLLM's hybrid cache manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables: `layers` are their indices in the model, `window` is the number of keys that a query sees, its own included;
    0 = all.
    """

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


def first_needed(window: int, computed: int, block_size: int) -> int:
    """Index of the first block that queries at positions from `computed` on read; the blocks before it may be given back. A window of 0 keeps all."""
    return max(0, computed - window + 1) // block_size if window else 0
