"""Layers whose keys have several widths, or that read those of another, in one cache: nothing is in the memory of something else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.groups import KVGroup, make_groups
from gristmill.runtime.kv_cache.paged import FORMATS, PagedCache, token_bytes
from gristmill.runtime.kv_cache.places import Place, Places
from gristmill.runtime.layer_attention import LayerAttention
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.parallel.mesh import Mesh, local_config

LLAMA = Path(__file__).resolve().parents[2] / "examples" / "models" / "docs-llama"
WINDOW = 8
BLOCKS = 7


def config(windows: list[int], *layers: tuple[int, int] | int) -> ModelConfig:
    """A model of layers with (KV heads, elements of a head), or that read the keys and values of a layer."""
    made: list[LayerAttention] = []
    for layer in layers:
        if isinstance(layer, int):
            made.append(replace(made[layer], source=layer))
        else:
            made.append(LayerAttention(layer[0], layer[1], layer[1]))
    like = load_config(LLAMA)
    return replace(like, num_layers=len(made), layer_attention=tuple(made), windows=tuple(windows))


def groups_of(c: ModelConfig) -> tuple[KVGroup, ...]:
    layers = range(c.num_layers)
    return make_groups(c.windows, [*map(c.kv_width, layers)], [*map(c.kv_source, layers)])


SMALL = [(2, 16)] * 5 + [(1, 64)] + [4] * 2 + [5]
"""Gemma 4 E2B, a sixth as many layers: windows of narrow heads, full attention of wide ones, and layers that read theirs."""
E2B = config([WINDOW] * 5 + [0] + [WINDOW] * 2 + [0], *SMALL)
DENSE = config(([WINDOW] * 5 + [0]) * 10, *([(16, 256)] * 5 + [(4, 512)]) * 10)
"""Gemma 4 31B: full attention has the narrower keys."""


def drawn(seed: int) -> ModelConfig:
    """Layers of random kinds, of which some read an earlier one of their window."""
    draw = random.Random(seed)
    kinds = [
        (window, (draw.choice((1, 2, 3)), draw.choice((4, 8, 20)))) for window in (0, WINDOW, 0, WINDOW)
    ][: draw.randint(2, 4)]
    windows: list[int] = []
    layers: list[tuple[int, int] | int] = []
    for _ in range(draw.randint(3, 12)):
        window, size = draw.choice(kinds)
        earlier = [
            i
            for i, own in enumerate(layers)
            if not isinstance(own, int) and (windows[i], own) == (window, size)
        ]
        layers.append(draw.choice(earlier) if earlier and draw.random() < 0.3 else size)
        windows.append(window)
    return config(windows, *layers)


CONFIGS = [E2B, DENSE, *map(drawn, range(24))]


def parts(cache: PagedCache, c: ModelConfig) -> Iterator[tuple[int, Tensor]]:
    """(block, its memory in a tensor) of each layer with keys and values of its own. Every block belongs to one group, as in a pool."""
    groups = cache.groups or (KVGroup(tuple(range(c.num_layers))),)
    for index, group in enumerate(groups):
        for block in range(index % BLOCKS, BLOCKS, max(1, min(len(groups), BLOCKS))):
            for layer in group.layers:
                if c.kv_source(layer) == layer:
                    yield from ((block, tensor[block]) for tensor in cache.layers[layer])


def conflicts(c: ModelConfig, form: str, grouped: bool) -> int:
    """Parts that do not hold what was written to them after all others were written."""
    groups = groups_of(c)[:BLOCKS] if grouped else ()
    if len(groups) > 1:  # more groups than blocks cannot each have one
        kept = [layer for group in groups for layer in group.layers]
        assert len(kept) == len(set(kept))
    cache = PagedCache(
        c, BLOCKS, 3, torch.float32, torch.device("cpu"), FORMATS[form], groups_of(c) if grouped else ()
    )
    cache.groups = groups if len(groups) > 1 else ()
    written = []
    for number, (_, memory) in enumerate(parts(cache, c)):
        value = torch.tensor(number % 200 + 1.0).to(memory.dtype)
        memory.fill_(value)
        written.append((value, memory))
    return sum(not bool((memory == value).all()) for value, memory in written)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("form", ["auto", "fp8_token_head"])
def test_what_is_written_stays(form: str, grouped: bool) -> None:
    for c in CONFIGS:
        assert conflicts(c, form, grouped) == 0


def test_layers_at_one_place_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: narrow layers that are to lie side by side are all at the beginning of their place."""

    class Wrong(Places):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            self.of = {layer: Place(place.number, 0) for layer, place in self.of.items()}

    monkeypatch.setattr("gristmill.runtime.kv_cache.paged.Places", Wrong)
    assert conflicts(E2B, "auto", grouped=True) > 0 and conflicts(E2B, "auto", grouped=False) > 0


def test_shapes_and_bytes() -> None:
    cache = PagedCache(E2B, BLOCKS, 16, torch.float32, torch.device("cpu"), groups=groups_of(E2B))
    assert [tuple(layer[0].shape) for layer in cache.layers] == [
        *[(BLOCKS + 1, 16, 2, 16)] * 5,
        (BLOCKS + 1, 16, 1, 64),
        *[(BLOCKS + 1, 16, 2, 16)] * 2,
        (BLOCKS + 1, 16, 1, 64),
    ]
    for reader, source in ((6, 4), (7, 4), (8, 5)):
        assert [t.data_ptr() for t in cache.layers[reader]] == [t.data_ptr() for t in cache.layers[source]]
    # Two narrow layers fit where a wide one does, so no byte of a block is lost but half of one in the third group.
    assert cache.nbytes == (BLOCKS + 1) * 16 * 2 * 64 * 4
    assert token_bytes(E2B, torch.float32, groups=groups_of(E2B)) == 2 * 64 * 4
    assert token_bytes(E2B, torch.float32) == 2 * (3 + 1) * 64 * 4
    # 10 of 60 layers have half as wide keys: two of them are a layer's memory.
    assert token_bytes(DENSE, torch.bfloat16) == (50 + 5) * 2 * 4096 * 2
    assert token_bytes(DENSE, torch.bfloat16, groups=groups_of(DENSE)) == 5 * 2 * 4096 * 2
    assert token_bytes(E2B, torch.bfloat16, FORMATS["fp8_token_head"]) == 4 * 2 * (64 + 4 * 4)


def test_groups_of_several_widths() -> None:
    assert groups_of(E2B) == (
        KVGroup((5, 8)),
        KVGroup((0, 1), WINDOW),
        KVGroup((2, 3), WINDOW),
        KVGroup((4, 6, 7), WINDOW),
    )
    first, *others = groups_of(DENSE)
    assert (first.window, len(first.layers)) == (0, 10) and len(others) == 10
    assert {(group.window, len(group.layers)) for group in others} == {(WINDOW, 5)}
    for c in CONFIGS:
        groups = groups_of(c)
        assert sorted(layer for group in groups for layer in group.layers) == [*range(c.num_layers)]
        for group in groups:
            assert all(c.kv_source(layer) in group.layers for layer in group.layers)
            if len(groups) > 1:
                assert {c.windows[layer] for layer in group.layers} == {group.window}


def test_a_layer_of_the_configuration() -> None:
    first, wide, reader = (E2B.of_layer(layer) for layer in (0, 5, 8))
    assert (first.num_kv_heads, first.head_dim, first.projected) == (2, 16, "qkv")
    assert (wide.num_kv_heads, wide.head_dim, wide.projected) == (1, 64, "qkv")
    assert (reader.num_kv_heads, reader.head_dim, reader.projected) == (1, 64, "q")
    assert E2B.of_layer(9) is E2B and E2B.kv_source(9) == 9
    assert prod((reader.num_kv_heads, reader.head_dim)) == E2B.kv_width(8)


def test_ranks_share_the_heads_of_each_layer() -> None:
    c = config([0, WINDOW], (2, 16), (4, 16))
    c = replace(c, num_heads=8, num_kv_heads=4)
    assert [layer.kv_heads for layer in local_config(c, Mesh(1, 4)).layer_attention] == [1, 1]
    assert [layer.kv_heads for layer in local_config(c, Mesh(1, 2)).layer_attention] == [1, 2]
    shared = local_config(c, Mesh(0, 2, context_parallel=True))
    assert [layer.kv_heads for layer in shared.layer_attention] == [2, 4]
    odd = replace(config([0, WINDOW], (3, 16), (4, 16)), num_heads=12, num_kv_heads=4)
    with pytest.raises(
        UsageError, match=r"12 query heads and 3 and 4 KV heads .* by 2 ranks; .* can: 1, 12$"
    ):
        local_config(odd, Mesh(0, 2))
