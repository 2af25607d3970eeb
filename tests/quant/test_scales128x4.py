"""scales128x4_v1: where each scale lies, said once more in numpy; exact inverses; what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import pack, quantize, unpack
from gristmill.quant.layouts._scales128x4 import tiled, untiled
from gristmill.quant.layouts.scales128x4_v1 import LAYOUT
from tests.quant.oracle import variants, weight


def place(row: int, group: int, groups: int) -> int:
    """The byte of a scale in the tiles of a matrix with so many groups: the figure of PTX's "scale factor layout", 128 x 4."""
    down, across = divmod(row, 128)[0], -(-groups // 4)
    quarter, lane = divmod(row % 128, 32)
    return ((down * across + group // 4) * 32 + lane) * 16 + quarter * 4 + group % 4


@pytest.mark.parametrize(("n", "groups"), [(1, 1), (31, 4), (128, 4), (129, 5), (300, 18), (257, 3)])
def test_every_scale_has_its_place(n: int, groups: int) -> None:
    scales = np.random.default_rng(n).integers(1, 256, (n, groups), dtype=np.uint8)
    expected = np.zeros(-(-n // 128) * -(-groups // 4) * 512, dtype=np.uint8)
    for row in range(n):
        for group in range(groups):
            assert expected[place(row, group, groups)] == 0, "two scales in one place"
            expected[place(row, group, groups)] = scales[row, group]
    tiles = tiled(torch.from_numpy(scales))
    assert tiles.shape == (-(-n // 128), -(-groups // 4), 512) and tiles.is_contiguous()
    assert np.array_equal(tiles.numpy().reshape(-1), expected)
    assert torch.equal(untiled(tiles, n, groups), torch.from_numpy(scales))


@pytest.mark.parametrize("name", LAYOUT.schemes)
def test_unpack_is_the_exact_inverse(name: str) -> None:
    seen = 0
    for q in variants(name):
        if q.g_idx is not None:
            continue  # refused, see below
        packed = pack(q, LAYOUT)
        assert tuple(packed.slots) == LAYOUT.slots and all(t.is_contiguous() for t in packed.tensors)
        assert packed.slots["codes"].data_ptr() == q.codes.data_ptr()
        assert unpack(packed).identical(q), q
        seen += 1
    assert seen > 1


@pytest.mark.parametrize("name", LAYOUT.schemes)
def test_bytes_are_counted(name: str) -> None:
    for n, k in ((37, 256), (16, 128), (129, 384), (200, 96)):
        assert pack(quantize(weight(n, k), name), LAYOUT).nbytes == LAYOUT.nbytes(name, n, k)
    assert LAYOUT.nbytes(name, 4096, 4096) <= 1.05 * QuantScheme.parse(name).weight_bytes(4096, 4096)


def test_act_order_is_refused() -> None:
    order = torch.arange(8, dtype=torch.int32).flip(0).repeat_interleave(32)
    q = dataclasses.replace(quantize(weight(37, 256), "mxfp4"), g_idx=order)
    with pytest.raises(ValueError, match="scales128x4_v1 holds codes with scales of groups of neighbouring"):
        pack(q, LAYOUT)
