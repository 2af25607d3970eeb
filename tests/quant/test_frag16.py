"""The frag16 layouts: read back from their documentation alone, exact inverses, sizes, refusals, and the
packing kernel."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, numeric, pack, quantize, unpack
from tests import forked
from tests.quant.oracle import act_order, variants, weight

LAYOUTS = tuple(default_registry().layout(f"{name}_frag16_v1") for name in ("w4", "f4", "w8"))
CASES = [(layout, scheme) for layout in LAYOUTS for scheme in layout.schemes]
NAMES = [scheme for _, scheme in CASES]


def tail_bytes(scheme: QuantScheme) -> int:
    groups = 128 // scheme.group_size if scheme.group_size else 1
    each = {"e4m3": 1, "e8m0": 1, "bf16": 2}.get(str(scheme.scale_dtype), 4) + int(scheme.zero_points)
    return 16 * groups * each


def bits(word: int, *places: int) -> int:
    """Returns the bits of a word; the first place is the most significant bit."""
    value = 0
    for place in places:
        value = value << 1 | word >> place & 1
    return value


FP4_PLACES = ((15, 8, 7, 6), (11, 4, 3, 2), (5, 30, 29, 28), (1, 26, 25, 0))
FP8_PLACES = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))


def codes_of_tile(tile: bytes, scheme: QuantScheme) -> torch.Tensor:
    """Reads uint8 [16, 128], word by word as the layouts' pages define."""
    out = torch.full((16, 128), 255, dtype=torch.int64)
    planes = 2 if scheme.is_integer and scheme.bits == 8 else 1
    for lane in range(32):
        g, t = divmod(lane, 4)
        for s in range(8):
            for odd in range(2):
                if scheme.bits == 8 and not scheme.is_integer:
                    for j in range(2):
                        at = 512 * (s // 2) + 16 * lane + 4 * (2 * (s % 2) + j)
                        word = int.from_bytes(tile[at : at + 4], "little")
                        for half, places in enumerate(FP8_PLACES):
                            out[g + 8 * half, 16 * s + 8 * j + 2 * t + odd] = bits(
                                word, *(p + 16 * odd for p in places)
                            )
                    continue
                at = 512 * (s // 4) + 16 * lane + 4 * (s % 4)
                for i in range(4):
                    place, code = (g + 8 * (i % 2), 16 * s + 8 * (i // 2) + 2 * t + odd), 0
                    for plane in range(planes):
                        word = int.from_bytes(tile[1024 * plane + at : 1024 * plane + at + 4], "little")
                        if scheme.is_integer:
                            code |= (word >> (4 * i + 16 * odd) & 15) << 4 * plane
                        else:
                            code = bits(word, *((p + 16 * odd) % 32 for p in FP4_PLACES[i]))
                    out[place] = code
    return out.to(torch.uint8)


def scales_of_tile(
    tail: bytes, scheme: QuantScheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reads float32 [16, 128], one scale per weight; and zero points or None."""
    groups = 128 // scheme.group_size if scheme.group_size else 1
    scale, zero = torch.zeros(16, groups), torch.zeros(16, groups)
    for g in range(8):
        for j in range(groups):
            for half in range(2):
                if scheme.scale_dtype in ("e4m3", "e8m0"):
                    byte = tail[g * 2 * groups + 4 * (j // 2) + 2 * half + j % 2]
                    nvfp4 = (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 21) if byte else 0.0
                    scale[g + 8 * half, j] = nvfp4 if scheme.scale_dtype == "e4m3" else 2.0 ** (byte - 253)
                    continue
                at = (2 * groups * g + 2 * j + half) * dtype.itemsize
                scale[g + 8 * half, j] = torch.frombuffer(
                    bytearray(tail[at : at + dtype.itemsize]), dtype=dtype
                ).float()
                if scheme.zero_points:
                    zero[g + 8 * half, j] = tail[32 * groups + 2 * groups * g + 2 * j + half]
    spread = 128 // groups
    return scale.repeat_interleave(spread, 1), zero.repeat_interleave(
        spread, 1
    ) if scheme.zero_points else None


def by_the_page(q: QuantTensor, layout: object) -> torch.Tensor:
    """Returns the dequantized weight from the slots, [N, K']."""
    scheme, slots = q.scheme, pack(q, layout).slots  # type: ignore[arg-type]
    raw, k = bytes(slots["tiles"].tolist()), slots["perm"].numel() or q.k
    count, groups = -(-q.n // 16), -(-k // 128)
    code_bytes = 256 * scheme.bits
    size = code_bytes + tail_bytes(scheme)
    dtype = slots["scale_type"].dtype if "scale_type" in slots else torch.uint8
    out = torch.full((count * 16, groups * 128), float("nan"))
    for tile in range(count):
        in_block = min(4, count - tile // 4 * 4)
        for group in range(groups):
            at = (tile // 4 * 4 * groups + group * in_block + tile % 4) * size
            codes = codes_of_tile(raw[at : at + code_bytes], scheme)
            scale, zero = scales_of_tile(raw[at + code_bytes : at + size], scheme, dtype)
            if scheme.is_integer:
                value = codes.float() - (zero if zero is not None else scheme.implicit_zero)
            else:
                value = numeric.e2m1_decode(codes) if scheme.bits == 4 else numeric.e4m3_decode(codes)
            out[tile * 16 : tile * 16 + 16, group * 128 : group * 128 + 128] = value * scale
    assert not bool(out.isnan().any()) and not bool(out[q.n :].any())
    out = out[: q.n, :k]
    unit = 256.0 if scheme.scale_dtype == "e4m3" else 1.0
    return out * (slots["row_scale"][:, None] / unit) if "row_scale" in slots else out


@pytest.mark.parametrize("n, k", [(16, 128), (40, 256), (133, 128)])
@pytest.mark.parametrize("layout, scheme", CASES, ids=NAMES)
def test_documented_order(layout: object, scheme: str, n: int, k: int) -> None:
    q = quantize(weight(n, k), scheme)
    assert torch.equal(by_the_page(q, layout), q.dequantize())


@pytest.mark.parametrize(
    "layout, scheme", [c for c in CASES if QuantScheme.parse(c[1]).requires_k_multiple == 1]
)
def test_documented_order_of_any_k(layout: object, scheme: str) -> None:
    q = quantize(weight(33, 137), scheme)
    assert torch.equal(by_the_page(q, layout), q.dequantize())


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "int8_g128"])
def test_documented_order_with_act_order(scheme: str) -> None:
    layout = next(layout_of_case for layout_of_case, name in CASES if name == scheme)
    q = quantize(weight(24, 256), scheme, g_idx=act_order(scheme, 256))
    values, perm = by_the_page(q, layout), pack(q, layout).slots["perm"].long()
    out = torch.zeros(q.n, q.k)
    out[:, perm[perm >= 0]] = values[:, perm >= 0]
    assert torch.equal(out, q.dequantize()) and not bool(values[:, perm < 0].any())


@pytest.mark.parametrize("layout, scheme", CASES, ids=NAMES)
def test_unpack_is_the_exact_inverse(layout: object, scheme: str) -> None:
    for q in variants(scheme):
        if q.scheme.is_integer and q.scales is not None and q.scales.dtype == torch.float32:
            with pytest.raises(ValueError, match="bfloat16 or float16 scales, got torch.float32"):
                pack(q, layout)  # type: ignore[arg-type]
            continue
        packed = pack(q, layout)  # type: ignore[arg-type]
        assert tuple(packed.slots) == layout.slots  # type: ignore[attr-defined]
        assert unpack(packed).identical(q), q


@pytest.mark.parametrize("layout, scheme", CASES, ids=NAMES)
def test_bytes_are_counted_and_stay_within_the_memory_policy(layout: object, scheme: str) -> None:
    for n, k in ((37, 256), (16, 128), (129, 384)):
        assert pack(quantize(weight(n, k), scheme), layout).nbytes == layout.nbytes(scheme, n, k)  # type: ignore[attr-defined, arg-type]
    assert layout.nbytes(scheme, 4096, 4096) <= 1.05 * QuantScheme.parse(scheme).weight_bytes(4096, 4096)  # type: ignore[attr-defined]


def test_float16_scales_keep_their_type() -> None:
    q = quantize(weight(20, 128), "int4_g128")
    assert q.scales is not None
    half = dataclasses.replace(q, scales=q.scales.to(torch.float16))
    packed = pack(half, "w4_frag16_v1")
    assert packed.slots["scale_type"].dtype == torch.float16 and unpack(packed).identical(half)


def test_every_e4m3_scale_and_the_extremes_of_e8m0_come_back() -> None:
    q = quantize(weight(8, 256), "nvfp4")
    assert q.scales is not None
    every = torch.arange(1, 127, dtype=torch.uint8).repeat(2)[:128].view(8, 16)
    q = dataclasses.replace(q, scales=every.view(torch.float8_e4m3fn))
    assert unpack(pack(q, "f4_frag16_v1")).identical(q)
    assert torch.equal(by_the_page(q, default_registry().layout("f4_frag16_v1")), q.dequantize())
    m = quantize(weight(4, 64), "mxfp4")
    for scales in ([[0, 0], [254, 200], [127, 1], [3, 4]], [[126, 0]] * 4):
        m = dataclasses.replace(m, scales=torch.tensor(scales, dtype=torch.uint8))
        assert unpack(pack(m, "f4_frag16_v1")).identical(m)


def test_refusals() -> None:
    q = quantize(weight(4, 64), "nvfp4")
    assert q.scales is not None
    codes = torch.full_like(q.codes, 0x11)
    negative = dataclasses.replace(q, scales=(-q.scales.float()).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="negative"):
        pack(negative, "f4_frag16_v1")
    nothing = dataclasses.replace(q, codes=codes, scales=torch.zeros(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="scales of 0 over codes"):
        pack(nothing, "f4_frag16_v1")
    m = quantize(weight(4, 64), "mxfp4")
    far = dataclasses.replace(m, codes=codes[:, :32], scales=torch.tensor([[200, 10]] * 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="apart"):
        pack(far, "f4_frag16_v1")
    z = quantize(weight(4, 64), "int4_g32_zp")
    assert z.zero is not None
    with pytest.raises(ValueError, match="integer zero points"):
        pack(dataclasses.replace(z, zero=z.zero.float()), "w4_frag16_v1")
    f = quantize(weight(4, 64), "fp8_ch")
    with pytest.raises(ValueError, match="NaN"):
        pack(dataclasses.replace(f, codes=torch.full_like(f.codes, 0x7F)), "w8_frag16_v1")


@pytest.mark.parametrize("layout, scheme", CASES, ids=NAMES)
def test_a_changed_bit_shows(layout: object, scheme: str) -> None:
    q = quantize(weight(33, 256), scheme)
    for place in (5, 256 * q.scheme.bits + 1):  # a code; a bit of the first scales in the first tile
        packed = pack(q, layout)  # type: ignore[arg-type]
        packed.slots["tiles"][place] ^= 1
        try:
            assert not unpack(packed).identical(q)
        except ValueError as error:  # raised where several tiles have to agree about a scale
            assert "differ" in str(error)


KERNEL_CASES = (
    ("int4_ch", 37, 137),
    ("nvfp4", 70, 144),
    ("int8_ch", 37, 137),
    ("fp8", 100, 137),
    ("int4_g32_zp", 33, 160),
)


def packed_by_the_kernel(scheme: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the code bytes of the tiles as ordered by the Triton kernel (interpreted) and by torch."""
    from gristmill.quant.layouts._frag16_codes import CODE_BYTES, block_views
    from gristmill.quant.layouts._frag16_scales import code_order
    from gristmill.quant.layouts._frag16_triton import ORDERS, _pack
    from gristmill.quant.layouts.w4_frag16_v1 import tile_bytes

    q = quantize(weight(n, k), scheme)
    layout = next(layout_of_case for layout_of_case, name in CASES if name == scheme)
    expected = pack(q, layout).slots["tiles"]
    out, size, order = torch.zeros_like(expected), tile_bytes(q.scheme), code_order(q.scheme)
    tiles, groups = -(-n // 16), -(-k // 128)
    _pack[(groups, tiles)](
        q.codes,
        out.view(torch.int32),
        n,
        k,
        q.codes.shape[1],
        q.codes.stride(0),
        tiles,
        groups,
        TILE_WORDS=size // 4,
        ORDER=ORDERS[order],
        PAD=q.scheme.implicit_zero,
    )
    both = [
        torch.cat(
            [view[..., : CODE_BYTES[order]].flatten() for _, view in block_views(t, tiles, groups, size)]
        )
        for t in (out, expected)
    ]
    return both[0], both[1]


def test_the_packing_kernel_agrees_with_torch() -> None:
    """Runs in a process of its own: whether Triton interprets is decided when it is imported."""
    pytest.importorskip("triton")
    code = (
        "import torch; from tests.quant.test_frag16 import packed_by_the_kernel\n"
        f"for case in {KERNEL_CASES}:\n    a, b = packed_by_the_kernel(*case)\n    assert torch.equal(a, b), case\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = forked.run("-c", code, cwd=root, env=environment, path=(root, root / "src"))
    assert process.returncode == 0, process.stderr[-2000:]
