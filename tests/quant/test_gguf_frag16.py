"""gguf_frag16_v1: read back from its documentation alone, exact inverses for blocks of every GGUF type, single rows, sizes, refusals."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, numeric, pack, quantize, unpack
from gristmill.quant.formats.gguf_blocks import TYPES, read_blocks
from gristmill.quant.layouts._gguf_factors import factor_rows, products
from gristmill.quant.packed import LayoutError, row_reader
from tests.quant.oracle import act_order, variants, weight

LAYOUT = default_registry().layout("gguf_frag16_v1")
PLACES = {"Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 numbers of a block are."""


def of_type(kind: str, n: int, k: int, seed: int = 0) -> QuantTensor:
    """A weight of random blocks, as a file has them."""
    block = TYPES[kind]
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (n, k // block.values, block.size), dtype=torch.uint8, generator=generator)
    for place in PLACES[kind]:
        d = torch.rand(n, k // block.values, 1, generator=generator) * 0.02 + 1e-5
        if kind == "Q6_K":  # of either sign, as its quantizer leaves them
            d *= torch.randint(0, 2, d.shape, generator=generator) * 2 - 1
        data[..., place : place + 2] = d.half().view(torch.uint8)
    return read_blocks("w", kind, data.flatten(1), (n, k))


def by_the_page(q: QuantTensor) -> torch.Tensor:
    """The dequantized weight [N, K'] from the slots, byte by byte as the layout's page defines."""
    scheme, slots = q.scheme, pack(q, LAYOUT).slots
    raw, k, dtype = bytes(slots["tiles"].tolist()), slots["perm"].numel() or q.k, slots["scale_type"].dtype
    count, groups, per = -(-q.n // 16), -(-k // 128), 128 // (scheme.group_size or 1)
    high_bytes = {4: 0, 5: 256, 6: 512}[scheme.bits]
    kinds = 2 if scheme.minimums else 1
    tail = 16 * (kinds * (2 + per) if dtype == torch.float32 else kinds * 2 * per)
    size = 1024 + high_bytes + tail
    out = torch.full((count * 16, groups * 128), float("nan"))

    def real(at: int) -> float:
        word = raw[at : at + 2]
        form, word = ("<e", word) if dtype != torch.bfloat16 else ("<f", b"\0\0" + word)
        return float(struct.unpack(form, word)[0])

    def scales(at: int, g: int, r: int, j: int) -> tuple[float, float]:
        if dtype != torch.float32:
            scale = real(at + 4 * per * g + 4 * j + 2 * r)
            return scale, real(at + 64 * per // 2 + 4 * per * g + 4 * j + 2 * r) if kinds == 2 else 0.0
        if kinds == 1:
            return real(at + 4 * g + 2 * r) * (raw[at + 32 + 16 * g + 2 * j + r] - 128), 0.0
        byte = at + 64 + 16 * g + 8 * (j // 2) + 2 * (j % 2) + r
        return real(at + 8 * g + 2 * r) * raw[byte], real(at + 8 * g + 4 + 2 * r) * raw[byte + 4]

    for tile in range(count):
        in_block = min(4, count - tile // 4 * 4)
        for group in range(groups):
            at = (tile // 4 * 4 * groups + group * in_block + tile % 4) * size
            for lane in range(32):
                g, t = divmod(lane, 4)
                for s in range(8):
                    word = int.from_bytes(raw[at + 512 * (s // 4) + 16 * lane + 4 * (s % 4) :][:4], "little")
                    for odd, c, r in ((i // 4, i // 2 % 2, i % 2) for i in range(8)):
                        code = word >> (4 * (2 * c + r) + 16 * odd) & 15
                        if scheme.bits == 5:
                            byte = raw[at + 1024 + 8 * lane + 4 * (s // 4) + 2 * odd + c]
                            code |= (byte >> (2 * (s % 4) + r) & 1) << 4
                        elif scheme.bits == 6:
                            byte = raw[at + 1024 + 16 * lane + 4 * (s // 2) + 2 * odd + c]
                            code |= (byte >> (4 * (s % 2) + 2 * r) & 3) << 4
                        column = 16 * s + 8 * c + 2 * t + odd
                        scale, offset = scales(at + 1024 + high_bytes, g, r, column * per // 128)
                        zero = 0 if kinds == 2 else 1 << (scheme.bits - 1)
                        out[tile * 16 + g + 8 * r, group * 128 + column] = (code - zero) * scale - offset
    assert not bool(out.isnan().any()) and not bool(out[q.n :].any())
    return out[: q.n, :k]


@pytest.mark.parametrize("n, k", [(16, 128), (133, 128), (40, 256)])
@pytest.mark.parametrize("scheme", LAYOUT.schemes)
def test_documented_order(scheme: str, n: int, k: int) -> None:
    q = quantize(weight(n, k), scheme)
    assert torch.equal(by_the_page(q), q.dequantize())


@pytest.mark.parametrize("kind", PLACES)
def test_documented_order_of_types(kind: str) -> None:
    q = of_type(kind, 25, 512)
    assert torch.equal(by_the_page(q), q.dequantize())


def test_documented_order_with_act_order() -> None:
    q = quantize(weight(24, 256), "int5_g32_min", g_idx=act_order("int5_g32_min", 256))
    values, perm = by_the_page(q), pack(q, LAYOUT).slots["perm"].long()
    out = torch.zeros(q.n, q.k)
    out[:, perm[perm >= 0]] = values[:, perm >= 0]
    assert torch.equal(out, q.dequantize())


@pytest.mark.parametrize("kind", PLACES)
def test_blocks_of_every_type_come_back(kind: str) -> None:
    factored = kind.endswith("K")
    for n, k in ((1, 256), (7, 512), (257, 256), (70, 1280)):
        q = of_type(kind, n, k, n)
        cuts = [q.narrow(1, 128, k - 160)]
        if not factored:  # inside a block, and inside a group
            cuts += [q.narrow(1, 64, k - 96), q.narrow(1, 3, k - 16)]
        for one in (q, *cuts, q.rows(torch.randperm(n))):
            packed = pack(one, LAYOUT)
            assert (packed.slots["scale_type"].dtype == torch.float32) is factored
            assert unpack(packed).identical(one), one


@pytest.mark.parametrize("scheme", LAYOUT.schemes)
def test_unpack_is_the_exact_inverse(scheme: str) -> None:
    for q in variants(scheme):
        packed = pack(q, LAYOUT)
        assert tuple(packed.slots) == LAYOUT.slots and unpack(packed).identical(q), q


def test_experts_of_a_k_quant() -> None:
    parts = [of_type("Q4_K", 33, 256, seed) for seed in range(3)]
    fields = {name: torch.stack([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
    q = parts[0].with_tensors(fields, (3, 33, 256))
    assert unpack(pack(q, LAYOUT)).identical(q)


def test_single_rows() -> None:
    read = row_reader(LAYOUT)
    assert read is not None
    weights = [of_type(kind, n, 512) for kind in PLACES for n in (1, 70, 133)]
    weights += [q for scheme in LAYOUT.schemes for q in variants(scheme) if not q.lead]
    for q in weights:
        index = torch.tensor([0, q.n - 1, q.n // 2, 0])
        assert torch.equal(read(pack(q, LAYOUT), index), q.dequantize()[index]), q
        assert read(pack(q, LAYOUT), index[:0]).shape == (0, q.k)


@pytest.mark.parametrize(
    ("kind", "tile"),
    [("Q4_1", 1280), ("Q5_0", 1408), ("Q5_1", 1536), ("Q4_K", 1216), ("Q5_K", 1472), ("Q6_K", 1696)],
)
def test_bytes(kind: str, tile: int) -> None:
    q = of_type(kind, 37, 512)
    packed = pack(q, LAYOUT)
    assert packed.nbytes == 3 * 4 * tile <= LAYOUT.nbytes(q.scheme, q.n, q.k)
    assert tile <= 1.06 * 2048 * TYPES[kind].size / TYPES[kind].values, "at most 6 % more than the file's"


@pytest.mark.parametrize("scheme", LAYOUT.schemes)
def test_the_bytes_of_16_bit_scales(scheme: str) -> None:
    for n, k in ((37, 256), (16, 128), (129, 384)):
        assert pack(quantize(weight(n, k), scheme), LAYOUT).nbytes == LAYOUT.nbytes(scheme, n, k)
    assert LAYOUT.nbytes(scheme, 4096, 4096) <= 1.05 * QuantScheme.parse(scheme).weight_bytes(4096, 4096)


@pytest.mark.parametrize("kind", PLACES)
def test_a_changed_bit_shows(kind: str) -> None:
    q = of_type(kind, 33, 256)
    code_bytes = 256 * q.scheme.bits
    for place in (5, code_bytes - 3, code_bytes + 1, code_bytes + 100):
        packed = pack(q, LAYOUT)
        packed.slots["tiles"][place] ^= 1
        assert not unpack(packed).identical(q), place


def test_every_factor_and_integer_come_back() -> None:
    """With every integer that a file can have, zeros of either sign, subnormal factors, and the largest."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.arange(0, 0x7C00, 7).to(torch.int16).view(torch.float16)
    for signed, low, high in ((False, 0, 64), (True, -128, 128)):
        d = torch.cat((bits, -bits)) if signed else bits
        integers = torch.randint(low, high, (len(d), 8 if signed else 4), generator=generator)
        integers[::5, 1:] = 0  # one divisor has many integers
        values = products(d, integers)
        found = factor_rows(values, signed)
        assert found is not None
        assert torch.equal(products(*found).view(torch.int32), values.view(torch.int32))
    zeros = torch.tensor([[0.0, 0.0], [-0.0, -0.0], [0.0, -0.0]])
    for signed, count in ((False, 2), (True, 3)):
        found = factor_rows(zeros[:count], signed)
        assert found is not None
        assert torch.equal(products(*found).view(torch.int32), zeros[:count].view(torch.int32))


@pytest.mark.parametrize(
    ("row", "signed"),
    [
        ((0.3, 0.1), False),  # no multiples of a float16
        ((1e30, 0.0), True),
        ((2.0**-25, 0.0), False),  # below the least float16
        ((1.0, 1 / 512), False),  # 512 is no byte
        ((0.5, -0.5), False),  # signs without signed integers
        ((0.5, -0.0), False),  # a zero of the other sign
        ((1.0, -129 / 128), True),
    ],
)
def test_rows_without_factors(row: tuple[float, ...], signed: bool) -> None:
    assert factor_rows(torch.tensor([(1.0, 2.0), row]), signed) is None


def test_refusals() -> None:
    q = of_type("Q4_K", 16, 256)
    assert q.scales is not None and q.zero is not None
    for field in ("scales", "zero"):
        other = getattr(q, field).clone()
        other[5, 3] = 0.3
        named = "offsets" if field == "zero" else "scales"
        with pytest.raises(LayoutError, match=f"{named} in float32 only where .* a float16 times integers"):
            pack(dataclasses.replace(q, **{field: other}), LAYOUT)
    with pytest.raises(
        LayoutError, match=r"offsets in the dtype of the scales, torch.float32, got torch.float16"
    ):
        pack(dataclasses.replace(q, zero=q.zero.half()), LAYOUT)
    with pytest.raises(
        LayoutError, match="those of a row's 128 columns"
    ):  # of two blocks, after a cut inside one
        pack(of_type("Q6_K", 16, 512).narrow(1, 64, 256), LAYOUT)
    five = of_type("Q5_0", 16, 256)
    assert five.scales is not None
    with pytest.raises(LayoutError, match=r"int5_g32 in torch.float16, torch.bfloat16, got torch.float32"):
        pack(dataclasses.replace(five, scales=five.scales.float()), LAYOUT)
    for scheme in ("int4_g32", "int4_g32_zp", "int8_g32", "int3_g16", "int5_g64", "mxfp4", "bf16"):
        assert "gguf_frag16_v1 holds" in str(LAYOUT.why_not(scheme))


def test_codes_span_all_bits() -> None:
    """The weights of these tests have every code."""
    for kind in PLACES:
        q = of_type(kind, 33, 256)
        codes = numeric.unpack_bits(q.codes, q.scheme.bits, q.k)
        assert codes.unique().numel() == 1 << q.scheme.bits
