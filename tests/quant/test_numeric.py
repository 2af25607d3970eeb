"""Number formats against ml_dtypes and by hand; bit streams against Python integers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.quant import numeric, quantize
from tests.quant.test_activations import Divisors


def floats() -> np.ndarray:
    """Returns every finite bf16 value, and random float32s near every boundary."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    close = np.random.default_rng(0).normal(size=20000).astype(np.float32) * 8
    grid = np.arange(-8, 8, 1 / 64, dtype=np.float32)
    around = np.concatenate([np.nextafter(grid, np.float32(9)), np.nextafter(grid, np.float32(-9)), grid])
    return np.concatenate([every[np.isfinite(every)], close, around])


def test_e2m1_encode_is_ml_dtypes() -> None:
    x = floats()
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    assert np.array_equal(numeric.e2m1_encode(torch.from_numpy(x)).numpy(), expected)


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 7.0, -1e30, 0.0, -0.0])
    assert numeric.e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 14, 7, 15, 0, 8]


def test_e2m1_decode() -> None:
    assert numeric.e2m1_decode(torch.arange(16, dtype=torch.uint8)).tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        0,
        -0.5,
        -1,
        -1.5,
        -2,
        -3,
        -4,
        -6,
    ]


def test_e4m3_is_ml_dtypes_and_saturates() -> None:
    x = floats()
    x = np.concatenate([x, x[np.abs(x) < 1e30] * 100])
    x = x[np.isfinite(x)]
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(numeric.e4m3_encode(torch.from_numpy(x)).numpy(), expected)
    special = torch.tensor([1e9, -1e9, float("inf"), 448.0, 464.0])
    assert numeric.e4m3_decode(numeric.e4m3_encode(special)).tolist() == [448, -448, 448, 448, 448]
    assert numeric.e4m3_encode(torch.tensor([float("nan")])).item() & 0x7F == 0x7F


def test_e4m3_decode_is_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(numeric.e4m3_decode(torch.from_numpy(codes)).numpy(), expected, equal_nan=True)


def test_e8m0_is_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(numeric.e8m0_decode(torch.from_numpy(codes)).numpy(), expected, equal_nan=True)
    exponents = torch.tensor([-1000, -127, 0, 127, 128])
    assert numeric.e8m0_encode(exponents).tolist() == [0, 0, 127, 254, 254]


def test_floor_log2_is_exact() -> None:
    x = torch.tensor([1.0, 1.9999999, 2.0, 0.5, 2.0**-126, 2.0**-149, 3.4e38, 0.0])
    assert numeric.floor_log2(x).tolist() == [0, 0, 1, -1, -126, -149, 127, -1000]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**32))
def test_bit_stream_is_a_little_endian_integer(bits: int, k: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, size=(rows, k), dtype=np.uint8)
    packed = numeric.pack_bits(torch.from_numpy(codes), bits)
    for row, stream in zip(codes.tolist(), packed.numpy(), strict=True):
        value = sum(code << (i * bits) for i, code in enumerate(row))
        assert stream.tobytes() == value.to_bytes(-(-k * bits // 8), "little")
    assert np.array_equal(numeric.unpack_bits(packed, bits, k).numpy(), codes)


def test_a_swapped_nibble_is_seen() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = numeric.pack_bits(codes, 4)
    swapped = (packed << 4) | (packed >> 4)
    assert not torch.equal(numeric.unpack_bits(swapped, 4, 16), codes)


def test_int3_straddles_bytes() -> None:
    assert numeric.pack_bits(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8), 3).tolist() == [
        0b11010001,
        0b01011000,
        0b00011111,
    ]


def test_bit_stream_errors() -> None:
    with pytest.raises(ValueError, match="1 to 8 bits, got 9"):
        numeric.pack_bits(torch.zeros(4, dtype=torch.uint8), 9)
    with pytest.raises(TypeError, match="uint8"):
        numeric.pack_bits(torch.zeros(4), 4)
    with pytest.raises(ValueError, match="7 codes of 4 bits take 4 bytes, got 3"):
        numeric.unpack_bits(torch.zeros(3, dtype=torch.uint8), 4, 7)


def test_the_largest_e4m3_magnitude() -> None:
    for seed in range(50):
        codes = torch.randint(
            0, 256, (3, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        values = numeric.e4m3_decode(codes).abs()
        expected = float("nan") if bool(values.isnan().any()) else float(values.max())
        assert str(numeric.e4m3_largest(codes)) == str(expected)
    for code, value in (
        (0x00, 0.0),
        (0x80, 0.0),
        (0x7E, 448.0),
        (0xFE, 448.0),
        (0x01, 2.0**-9),
        (0x81, 2.0**-9),
    ):
        assert numeric.e4m3_largest(torch.tensor([0x80, code], dtype=torch.uint8)) == value
    assert all(
        str(numeric.e4m3_largest(torch.tensor([0, bad], dtype=torch.uint8))) == "nan" for bad in (0x7F, 0xFF)
    )


def test_weights_are_divided_by_tensors() -> None:
    """A GPU multiplies by the reciprocal of a Python number, so scales would differ from device to device."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    with Divisors() as divisors:
        for name in ("int4_g32", "int4_g32_zp", "int8_ch", "fp8", "fp8_ch", "fp8_block", "nvfp4", "mxfp4"):
            quantize(x, name)
    assert len(divisors.seen) > 10 and all(isinstance(value, torch.Tensor) for value in divisors.seen)
    with Divisors() as divisors:
        x / 7  # planted fault
    assert divisors.seen == [7]


def test_divide_is_the_ieee_division() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = x.double().div(448).float()  # a division of 24-bit significands is right after rounding twice
    assert torch.equal(numeric.divide(x, 448.0), expected)
