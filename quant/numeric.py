"""Number formats: E2M1, E4M3, E8M0 and dense bit streams, encoded and decoded exactly, ties to even, saturating.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0; OCP 8-bit Floating Point v1.0 for E4M3 (the "fn"
variant: no infinities, largest finite 448). Every function works on any device and takes any leading dimensions.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv

E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
E8M0_BIAS: Final = 127
E8M0_NAN: Final = 255

# Halfway points between neighbours, and whether the tie goes up: to the neighbour whose mantissa bit is even.
_E2M1_STEPS: Final = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def divide(values: Tensor, divisor: float) -> Tensor:
    """values / divisor, an IEEE division on every device.

    On a GPU torch multiplies by the reciprocal of a Python number, which is up to one ulp off. A scale that is one ulp off turns every tie
    of a value between two codes.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def e2m1_encode(x: Tensor) -> Tensor:
    """E2M1 codes 0..15 (uint8) of float values, nearest with ties to even, saturating at 6.

    The sign of zero is kept (-0 is code 8). NaN has no code: reject it before.
    """
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for threshold, tie_up in _E2M1_STEPS:
        code += (magnitude >= threshold) if tie_up else (magnitude > threshold)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes 0..15."""
    # The same bits as a float16 whose exponent is too small by 14; a table would have to be copied to the device.
    bits = codes.to(torch.int16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).view(torch.float16).to(torch.float32) * 16384.0


def e4m3_encode(x: Tensor) -> Tensor:
    """E4M3 bytes (uint8) of float values, nearest with ties to even, saturating at 448; NaN stays NaN."""
    return x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """float32 values of E4M3 bytes."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def e4m3_largest(codes: Tensor) -> float:
    """The largest magnitude among E4M3 bytes, NaN if there is one: two reductions, nothing decoded."""
    positive = int(codes.view(torch.int8).max())  # the sign bit makes others negative
    top = int(codes.max())
    if positive == 0x7F or top == 0xFF:
        return math.nan
    largest = max(positive, top & 0x7F if top & 0x80 else 0, 0)
    return float(e4m3_decode(torch.tensor([largest], dtype=torch.uint8)))


def e4m3fn_to_fnuz(codes: Tensor) -> Tensor:
    """E4M3 bytes -> bytes of e4m3fnuz (gfx94x), each of half the value: the same bits under a bias larger by one.

    -0 (byte 0x80), NaN there, becomes 0. Whoever multiplies with them doubles the scale. NaN has no counterpart: reject it
    before.
    """
    return torch.where(codes == 0x80, torch.zeros_like(codes), codes)


def e4m3fnuz_to_fn(codes: Tensor) -> Tensor:
    """e4m3fnuz bytes -> E4M3 bytes of twice the value: the reader halves the scale.

    Raises:
        ValueError: NaN (0x80), or 240 and -240 (0x7F, 0xFF), whose doubles E4M3 does not have.
    """
    if bool(((codes == 0x80) | ((codes & 0x7F) == 0x7F)).any()):
        raise ValueError(
            "e4m3fnuz codes 0x7F, 0xFF (240 of either sign) and 0x80 (NaN) have no E4M3 code of twice the value"
        )
    return codes.clone()


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2 x) of positive float32 values as int32, exact for subnormals; 0 gives -1000 (below any format)."""
    exponent = torch.frexp(x.to(torch.float32)).exponent - 1
    return torch.where(x > 0, exponent, torch.full_like(exponent, -1000))


def e8m0_encode(exponent: Tensor) -> Tensor:
    """E8M0 bytes of integer exponents, clamped to -127..127 (byte 255, NaN, is never made)."""
    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)


def e8m0_decode(codes: Tensor) -> Tensor:
    """float32 2**(byte - 127), exact; byte 0 is the subnormal 2**-127 and byte 255 NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(codes == E8M0_NAN, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Dense little-endian bit stream along the last dimension: code i occupies bits [i*bits, (i+1)*bits).

    Args:
        codes: uint8 [..., K], each below 2**bits (higher bits are an error of the caller and are cut off).
        bits: 1 to 8.

    Returns:
        uint8 [..., ceil(K * bits / 8)]; unused high bits of the last byte are 0. For 4 bits the low nibble is even k.
    """
    _check_bits(codes, bits)
    if bits == 8:
        return codes.contiguous()
    k, (count, width) = codes.shape[-1], _run(bits)
    lanes = _pad_last(codes & ((1 << bits) - 1), count).unflatten(-1, (-1, count))
    out = torch.zeros((*lanes.shape[:-1], width), dtype=torch.uint8, device=codes.device)
    for i in range(count):
        byte, shift = divmod(i * bits, 8)
        out[..., byte] |= lanes[..., i] << shift  # what passes the byte's end falls off
        if shift + bits > 8:
            out[..., byte + 1] |= lanes[..., i] >> (8 - shift)
    return out.flatten(-2)[..., : cdiv(k * bits, 8)].contiguous()


def unpack_bits(stream: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of :func:`pack_bits`: uint8 [..., ceil(k * bits / 8)] -> uint8 [..., k].

    Raises:
        ValueError: the last dimension is not ceil(k * bits / 8) bytes.
    """
    _check_bits(stream, bits)
    expected = cdiv(k * bits, 8)
    if stream.shape[-1] != expected:
        raise ValueError(f"{k} codes of {bits} bits take {expected} bytes, got {stream.shape[-1]}")
    if bits == 8:
        return stream.contiguous()
    count, width = _run(bits)
    octets = _pad_last(stream, width).unflatten(-1, (-1, width))
    out = torch.empty((*octets.shape[:-1], count), dtype=torch.uint8, device=stream.device)
    for i in range(count):
        byte, shift = divmod(i * bits, 8)
        code = octets[..., byte] >> shift
        if shift + bits > 8:
            code = code | (octets[..., byte + 1] << (8 - shift))
        out[..., i] = code & ((1 << bits) - 1)
    return out.flatten(-2)[..., :k].contiguous()


def _run(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes those are."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


def _pad_last(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))


def _check_bits(codes: Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"a bit stream has codes of 1 to 8 bits, got {bits}")
    if codes.dtype != torch.uint8 or codes.dim() == 0:
        raise TypeError(f"codes are uint8 [..., K], got {codes.dtype} {list(codes.shape)}")
