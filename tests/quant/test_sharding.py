"""shard, narrow, concat and stack dequantize to the same bits for every scheme, also with odd cuts and
act-order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES
from gristmill.quant import QuantTensor, concat, quantize, stack
from tests.quant.oracle import QUANTIZED, act_order, variants, weight


def check_shards(q: QuantTensor, dim: int, parts: list[QuantTensor]) -> None:
    """Checks that part r equals slice r, bit for bit."""
    full, start = q.dequantize(), 0
    for part in parts:
        assert torch.equal(part.dequantize(), full.narrow(dim, start, part.shape[dim]))
        start += part.shape[dim]
    assert start == q.shape[dim]


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
@pytest.mark.parametrize(
    "dim, world", [(0, 2), (0, 3), (0, 5), (1, 2), (1, 3), (1, 16), (1, 128), (-1, 4), (-2, 10)]
)
def test_shard_is_the_slice_and_concat_the_whole(name: str, dim: int, world: int) -> None:
    q = quantize(weight(210, 384), name)
    parts = [q.shard(dim, rank, world) for rank in range(world)]
    check_shards(q, dim, parts)
    assert torch.equal(concat(parts, dim).dequantize(), q.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_shards_of_every_variant(name: str) -> None:
    for q in variants(name, 36, 256):
        for dim in range(len(q.shape)):
            for world in (2, 3):
                if q.shape[dim] % world == 0:
                    parts = [q.shard(dim, rank, world) for rank in range(world)]
                    check_shards(q, dim, parts)
                    assert torch.equal(concat(parts, dim).dequantize(), q.dequantize()), (q, dim)


@pytest.mark.parametrize("name", QUANTIZED)
def test_swapped_shards_are_seen(name: str) -> None:
    q = quantize(weight(210, 384), name)
    for dim in (0, 1):
        with pytest.raises(AssertionError):
            check_shards(q, dim, [q.shard(dim, 1, 2), q.shard(dim, 0, 2)])


@settings(max_examples=120, deadline=None)
@given(data=st.data(), name=st.sampled_from(QUANTIZED), order=st.booleans())
def test_random_cuts(data: st.DataObject, name: str, order: bool) -> None:
    ordered = order and "_g" in name
    q = quantize(weight(141, 256), name, g_idx=act_order(name, 256) if ordered else None)
    expected = q.dequantize()
    for _ in range(data.draw(st.integers(1, 3))):  # cuts of cuts
        dim = data.draw(st.integers(0, 1))
        start = data.draw(st.integers(0, q.shape[dim] - 1))
        length = data.draw(st.integers(1, q.shape[dim] - start))
        q, expected = q.narrow(dim, start, length), expected.narrow(dim, start, length)
        assert torch.equal(q.dequantize(), expected)
    dim = data.draw(st.integers(0, 1))
    cut = data.draw(st.integers(0, q.shape[dim]))
    if 0 < cut < q.shape[dim]:
        joined = concat([q.narrow(dim, 0, cut), q.narrow(dim, cut, q.shape[dim] - cut)], dim)
        assert torch.equal(joined.dequantize(), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_fused_matrices_keep_their_scales(name: str) -> None:
    """q/k/v of 200, 70 and 70 rows: partial 128-blocks and three global multipliers in one tensor."""
    parts = [quantize(weight(n, 128, n) * f, name) for n, f in ((200, 1.0), (70, 9.0), (71, 0.05))]
    fused = concat(parts, 0)
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))
    if fused.scheme.has_global:
        assert fused.segments == (0, 200, 270)
        assert torch.equal(fused.global_scale, torch.cat([p.global_scale for p in parts]))
        assert torch.equal(fused.row_scale()[199:201], fused.global_scale[:2])
        assert fused.narrow(0, 210, 100).segments == (0, 60)
    if name == "fp8_block":
        assert fused.n_idx is not None and fused.n_idx[[0, 127, 128, 199, 200, 270]].tolist() == [
            0,
            0,
            1,
            1,
            2,
            3,
        ]
    check_shards(fused, 0, [fused.shard(0, r, 11) for r in range(11)])


def test_regular_cuts_carry_no_index() -> None:
    q = quantize(weight(384, 512), "fp8_block")
    assert q.shard(0, 1, 3).n_idx is None and q.shard(1, 1, 4).g_idx is None
    assert q.shard(0, 1, 3).scales.shape == (1, 4)
    assert q.shard(0, 1, 6).n_idx is None  # rows 64..127 of one block
    assert q.shard(0, 1, 4).n_idx.unique().tolist() == [0, 1]  # rows 96..191
    assert concat([q.shard(0, r, 3) for r in range(3)], 0).identical(q)
    g = quantize(weight(8, 512), "int4_g128")
    assert g.shard(1, 1, 2).g_idx is None
    assert g.narrow(1, 64, 128).g_idx.tolist() == [0] * 64 + [1] * 64
    assert concat([g.shard(1, r, 4) for r in range(4)], 1).identical(g)


def test_act_order_shard_keeps_only_its_groups() -> None:
    g_idx = torch.tensor([0, 1, 2, 3] * 32, dtype=torch.int32)
    g_idx[:32] = 1
    g_idx[torch.arange(33, 128, 4)[:24]] = 0  # makes the sizes of groups irrelevant
    q = quantize(weight(4, 128), "int4_g32", g_idx=g_idx)
    part = q.narrow(1, 0, 32)
    assert part.scales.shape == (4, 1) and part.g_idx is None
    assert torch.equal(part.dequantize(), q.dequantize()[:, :32])


def test_a_shard_owns_its_memory() -> None:
    q = quantize(weight(64, 256), "int4_g128")
    for dim in (0, 1):
        part = q.shard(dim, 0, 2)
        for tensor in part.tensors().values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    before = q.dequantize()
    q.shard(0, 0, 2).codes.zero_()
    assert torch.equal(q.dequantize(), before)


def test_experts_shard_and_stack() -> None:
    matrices = [quantize(weight(32, 128, i), "nvfp4") for i in range(4)]
    q = stack(matrices)
    assert q.shape == (4, 32, 128)
    assert all(a.identical(b) for a, b in zip(q.experts(), matrices, strict=True))
    assert torch.equal(q.shard(0, 1, 2).dequantize(), q.dequantize()[2:])
    assert concat([q.shard(0, r, 4) for r in range(4)], 0).identical(q)
    gate_up = concat([q, stack(list(reversed(matrices)))], 1)
    assert gate_up.segments == (0, 32) and gate_up.global_scale.shape == (4, 2)
    check_shards(gate_up, 1, [gate_up.shard(1, r, 4) for r in range(4)])


def test_what_cannot_be_exact_is_refused() -> None:
    a, b = quantize(weight(8, 128), "nvfp4"), quantize(weight(8, 128) * 3, "nvfp4")
    with pytest.raises(ValueError, match="global scales differ"):
        concat([a, b], 1)
    a, b = quantize(weight(8, 128), "int8_ch"), quantize(weight(8, 128) * 3, "int8_ch")
    with pytest.raises(ValueError, match="per-channel scales differ"):
        concat([a, b], 1)
    g_idx = act_order("int4_g32", 128)
    a, b = quantize(weight(8, 128), "int4_g32", g_idx=g_idx), quantize(weight(8, 128), "int4_g32")
    with pytest.raises(ValueError, match="g_idx differs"):
        concat([a, b], 0)
    with pytest.raises(ValueError, match="g_idx differs"):
        stack([a, b])
    block = quantize(weight(200, 128), "fp8_block")
    with pytest.raises(ValueError, match="n_idx differs"):
        concat([block.narrow(0, 10, 190), block.narrow(0, 0, 190)], 1)
    with pytest.raises(ValueError, match="segments"):
        n = quantize(weight(8, 128), "nvfp4")
        stack([concat([n.narrow(0, 0, 4), n.narrow(0, 4, 4)], 0), n])


def test_bad_arguments() -> None:
    q = quantize(weight(10, 128), "int4_g32")
    with pytest.raises(ValueError, match="10 entries, not divisible by 4"):
        q.shard(0, 0, 4)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        q.shard(0, 2, 2)
    with pytest.raises(ValueError, match="dimension 2 is outside"):
        q.shard(2, 0, 2)
    with pytest.raises(ValueError, match="outside dimension 1"):
        q.narrow(1, 100, 29)
    with pytest.raises(ValueError, match="outside dimension 0"):
        q.narrow(0, 3, 0)
    with pytest.raises(ValueError, match="at least one"):
        concat([], 0)
    with pytest.raises(ValueError, match="at least one"):
        stack([])
    with pytest.raises(ValueError, match="schemes differ"):
        concat([q, quantize(weight(10, 128), "int4_g64")], 0)
    with pytest.raises(ValueError, match="other dimensions differ"):
        concat([q, quantize(weight(10, 64), "int4_g32")], 0)
    half = QuantTensor(q.codes, q.scales.half(), q.shape, q.scheme)
    with pytest.raises(ValueError, match="dtypes of scales differ"):
        concat([q, half], 0)
