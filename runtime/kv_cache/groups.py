"""Groups of layers whose caches hold the same tokens: full attention keeps all of a request, a sliding window its last ones.

The layers of a group have keys of one width, and the groups as many bytes per block (`places`), so one pool of ids serves all. Layers
that read the keys and values of another are in its group. A request has a block table per group. One list holds them, interleaved: its
entry ``index * groups + group`` is the block of the tokens ``index * block_size`` and on. A place whose block was given back holds the
null block, ``num_blocks``, which is never written.

A layer with a state of constant size would be a group with another answer of `first_needed`. Groups are vLLM's hybrid cache manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.kernel_registry.scheme import cdiv


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables: `layers` are their indices in the model, `window` is the number of keys that a query sees, its own included;
    0 = all.
    """

    layers: tuple[int, ...]
    window: int = 0


def make_groups(
    windows: Sequence[int], widths: Sequence[int] = (), sources: Sequence[int] = ()
) -> tuple[KVGroup, ...]:
    """The groups of layers with these windows, full attention first: each as large as the rarest kind, the last of a kind may be smaller.

    One group without a window if all layers have the same one: a prefix is found by the blocks of full attention.

    Args:
        widths: of each layer's keys: layers of several widths are of several kinds, and a group has more of the narrow ones; empty = all alike.
        sources: for each layer, the one whose keys and values it reads; empty = its own.
    """
    layers = range(len(windows))
    if len({*windows}) == 1 or 0 not in windows:
        return (KVGroup(tuple(layers)),)
    widths, sources = widths or [1] * len(windows), sources or layers
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer in layers:
        if sources[layer] == layer:
            kinds.setdefault((windows[layer], widths[layer]), []).append(layer)
    widest = max(width for _, width in kinds)
    places = min(cdiv(len(alike), widest // width) for (_, width), alike in kinds.items())
    groups = []
    for (window, width), alike in sorted(kinds.items()):
        size = places * (widest // width)
        for start in range(0, len(alike), size):
            own = alike[start : start + size]
            groups.append(KVGroup(tuple(layer for layer in layers if sources[layer] in own), window))
    return tuple(groups)


def first_needed(window: int, computed: int, block_size: int) -> int:
    """Index of the first block that queries at positions from `computed` on read; the blocks before it may be given back. A window of 0 keeps all."""
    return max(0, computed - window + 1) // block_size if window else 0
