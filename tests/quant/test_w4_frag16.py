"""w4_frag16_v1: read back by its documentation alone, exact inverse, bytes, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.quant import QuantTensor, pack, quantize, unpack
from gristmill.quant.layouts.w4_frag16_v1 import LAYOUT
from tests.quant.oracle import act_order, variants, weight


def by_the_page(q: QuantTensor) -> torch.Tensor:
    """The dequantized weight from the slots, word by word as the layout's docstring says."""
    slots = pack(q, LAYOUT).slots
    raw, k = bytes(slots["tiles"].tolist()), slots["perm"].numel() or q.k
    count, groups = -(-q.n // 16), k // 128
    out = torch.full((count * 16, k), float("nan"))
    for tile in range(count):
        in_block = min(4, count - tile // 4 * 4)
        for group in range(groups):
            at = (tile // 4 * 4 * groups + group * in_block + tile % 4) * 1056
            scales = torch.frombuffer(bytearray(raw[at + 1024 : at + 1056]), dtype=slots["scale_type"].dtype).float()
            for lane in range(32):
                g, t = divmod(lane, 4)
                for s in range(8):
                    word = at + 512 * (s // 4) + 16 * lane + 4 * (s % 4)
                    bits = int.from_bytes(raw[word : word + 4], "little")
                    for i in range(4):
                        row, column = g + 8 * (i % 2), group * 128 + 16 * s + 8 * (i // 2) + 2 * t
                        for odd in range(2):
                            code = bits >> (4 * i + 16 * odd) & 15
                            out[tile * 16 + row, column + odd] = (code - 8) * scales[2 * g + i % 2]
    assert not bool(out.isnan().any()) and not bool(out[q.n :].any())
    return out[: q.n]


@pytest.mark.parametrize("n, k", [(16, 128), (40, 256), (133, 128)])
def test_documented_order(n: int, k: int) -> None:
    q = quantize(weight(n, k), "int4_g128")
    assert torch.equal(by_the_page(q), q.dequantize())


def test_documented_order_with_act_order() -> None:
    q = quantize(weight(24, 256), "int4_g128", g_idx=act_order("int4_g128", 256))
    packed = pack(q, LAYOUT)
    values, perm = by_the_page(q), packed.slots["perm"].long()
    out = torch.zeros(q.n, q.k)
    out[:, perm[perm >= 0]] = values[:, perm >= 0]
    assert torch.equal(out, q.dequantize()) and not bool(values[:, perm < 0].any())


def test_unpack_is_the_exact_inverse() -> None:
    for q in variants("int4_g128"):
        if q.scales is not None and q.scales.dtype == torch.float32:
            with pytest.raises(ValueError, match="bfloat16 or float16 scales, got torch.float32"):
                pack(q, LAYOUT)
            continue
        packed = pack(q, LAYOUT)
        assert tuple(packed.slots) == LAYOUT.slots
        assert unpack(packed).identical(q), q


def test_bytes_are_counted_and_cost_nothing() -> None:
    for n, k in ((37, 256), (16, 128), (129, 384)):
        assert pack(quantize(weight(n, k), "int4_g128"), LAYOUT).nbytes == LAYOUT.nbytes("int4_g128", n, k)
    q = quantize(weight(64, 256), "int4_g128")
    assert LAYOUT.nbytes("int4_g128", 64, 256) == q.scheme.weight_bytes(64, 256)


def test_float16_scales_keep_their_type() -> None:
    q = quantize(weight(20, 128), "int4_g128")
    assert q.scales is not None
    half = dataclasses.replace(q, scales=q.scales.to(torch.float16))
    packed = pack(half, LAYOUT)
    assert packed.slots["scale_type"].dtype == torch.float16 and unpack(packed).identical(half)


def test_a_doubled_scale_shows() -> None:
    q = quantize(weight(33, 256), "int4_g128")
    packed = pack(q, LAYOUT)
    packed.slots["tiles"][1024 + 1] ^= 1  # one exponent bit of the first tile's first scale
    assert not unpack(packed).identical(q)
