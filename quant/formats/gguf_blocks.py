"""Blocks of ggml's quantized types to QuantTensors, value for value.

Every type is blocks along K, each with its scales inside. With d, dmin, m float16 and s, t small integers of a sub-block:

===========  ====  =====  ====================================================  ==================
type         bits  block  value                                                 scheme
===========  ====  =====  ====================================================  ==================
Q4_0         4     32     (q - 8) * d                                           int4_g32
Q4_1         4     32     q * d + m                                             int4_g32_min
Q5_0, Q5_1   5     32     (q - 16) * d, q * d + m                               int5_g32, _min
Q8_0         8     32     q * d, q signed                                       int8_g32
Q2_K         2     256    q * (d * s) - dmin * t, s and t of 4 bits, 16 wide    int2_g16_min
Q3_K         3     256    (q - 4) * (d * s), s signed of 6 bits, 16 wide        int3_g16
Q4_K, Q5_K   4, 5  256    q * (d * s) - dmin * t, s and t of 6 bits, 32 wide    int4_g32_min, int5
Q6_K         6     256    (q - 32) * (d * s), s of 8 bits, signed, 16 wide      int6_g16
MXFP4        4     32     e2m1 * 2^(e - 127)                                    mxfp4
===========  ====  =====  ====================================================  ==================

Products of a float16 and a small integer are exact in float32, which is what scales and offsets of K-quants are here.
Source: the block structures of ggml (ggml-common.h, ggml-quants.c), MIT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import numeric
from gristmill.quant.formats.args import BLOCKS
from gristmill.quant.formats.contract import FormatError, Place, make, new_codes
from gristmill.quant.native import packing_function
from gristmill.quant.tensor import QuantTensor

Fields = tuple[Tensor, Tensor, Tensor | None]
"""Codes of a block one per byte, or as a bit stream; scales [..., groups of a block]; offsets or None."""


_NATIVE = {"Q4_0": 2, "Q8_0": 8, "MXFP4": 39}
"""The types that `_gguf_blocks_cpu.cpp` splits, and ggml's numbers of them."""

_CHUNK = 1 << 18
"""Bytes of blocks decoded at a time, such that the result stays in the cache of a core."""


@dataclass(frozen=True)
class BlockType:
    """One type: values and bytes of a block, the resulting scheme, and the function that splits a block [..., size] into fields."""

    values: int
    size: int
    scheme: str
    fields: Callable[[Tensor], Fields]


def read_blocks(
    name: str, kind: str, blocks: Tensor, shape: tuple[int, ...], place: Place = new_codes
) -> QuantTensor:
    """The bytes of a tensor, uint8 [..., N, bytes of a row], of a type by ggml's name -> QuantTensor [..., N, K].

    Raises:
        FormatError: a type that is not read, a K that is no multiple of its block, bytes that do not fit the shape.
    """
    block_type = TYPES.get(kind)
    if block_type is None:
        raise FormatError(f"{name}: ggml type {kind} is not read; known: F32, F16, BF16, {', '.join(TYPES)}")
    k = shape[-1]
    if k % block_type.values:
        raise FormatError(f"{name}: {kind} has blocks of {block_type.values} along K, and K is {k}")
    row = k // block_type.values * block_type.size
    if tuple(blocks.shape) != (*shape[:-1], row):
        raise FormatError(f"{name}: {kind} {list(shape)} has rows of {row} bytes, got {list(blocks.shape)}")
    scheme, rows = QuantScheme.parse(block_type.scheme), blocks.reshape(-1, row)
    packed = place((*shape[:-1], scheme.code_bytes(k)))
    native = packing_function("gm_gguf_blocks", BLOCKS) if kind in _NATIVE else None
    if native is not None and rows.device.type == "cpu" and packed.is_contiguous():
        rows, scale_dtype = rows.contiguous(), torch.uint8 if scheme.scale_dtype == "e8m0" else torch.float16
        scales = torch.empty((*shape[:-1], k // block_type.values), dtype=scale_dtype)
        native(
            data=rows.data_ptr(),
            blocks=scales.numel(),
            type=_NATIVE[kind],
            codes=packed.data_ptr(),
            scales=scales.data_ptr(),
        )
        return make(name, packed, scales, shape, scheme)
    pieces, step = [], max(1, _CHUNK // row)
    out = packed.view(-1, packed.shape[-1])
    for start in range(0, rows.shape[0], step):
        codes, scales, offsets = block_type.fields(
            rows[start : start + step].unflatten(-1, (-1, block_type.size))
        )
        stream = codes.shape[-1] * 8 == block_type.values * scheme.bits
        out[start : start + step] = (
            codes.flatten(-2) if stream else numeric.pack_bits(codes.flatten(-2), scheme.bits)
        )
        pieces.append((scales.flatten(-2),) if offsets is None else (scales.flatten(-2), offsets.flatten(-2)))
    fields = [torch.cat(parts).view(*shape[:-1], -1) for parts in zip(*pieces, strict=True)]
    return make(name, packed, fields[0], shape, scheme, fields[1] if len(fields) > 1 else None)


def _half(block: Tensor, at: int) -> Tensor:
    """The float16 at a byte, [..., 1]."""
    return block[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles, then high ones: [..., B] -> [..., 2B]."""
    return torch.cat((packed & 0xF, packed >> 4), -1)


def _stream(packed: Tensor, run: int) -> Tensor:
    """Runs of bytes with the low nibbles' codes before the high ones', [..., B] -> those codes as a bit stream [..., B]."""
    runs = packed.unflatten(-1, (-1, run))
    # The copy is aligned, unlike a part of a block.
    pairs = runs.clone(memory_format=torch.contiguous_format).view(torch.int16)
    halves = []
    for shift in (0, 4):
        nibbles = (pairs >> shift) & 0x0F0F
        halves.append((nibbles | (nibbles >> 4)).to(torch.uint8))  # the low byte
    return torch.cat(halves, -1).flatten(-2)


def _planes(packed: Tensor, bits: int, run: int) -> Tensor:
    """Codes in planes: bits [i*bits, (i+1)*bits) of a run of bytes hold its i-th run of codes. [..., B] -> [..., B * 8 / bits]."""
    runs = packed.unflatten(-1, (-1, run))
    lanes = [(runs >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(lanes, -2).flatten(-3)


def _bits(packed: Tensor) -> Tensor:
    """Bit j of byte i is value 8i + j: [..., B] -> [..., 8B]."""
    return torch.stack([(packed >> j) & 1 for j in range(8)], -1).flatten(-2)


def _q4_0(b: Tensor) -> Fields:
    return _stream(b[..., 2:], 16), _half(b, 0), None


def _q4_1(b: Tensor) -> Fields:
    return _stream(b[..., 4:], 16), _half(b, 0), -_half(b, 2)


def _q5_0(b: Tensor) -> Fields:
    return _nibbles(b[..., 6:]) | (_bits(b[..., 2:6]) << 4), _half(b, 0), None


def _q5_1(b: Tensor) -> Fields:
    return _nibbles(b[..., 8:]) | (_bits(b[..., 4:8]) << 4), _half(b, 0), -_half(b, 2)


def _q8_0(b: Tensor) -> Fields:
    return b[..., 2:] ^ 0x80, _half(b, 0), None


def _q2_k(b: Tensor) -> Fields:
    scales, d, dmin = b[..., :16], _half(b, 80).float(), _half(b, 82).float()
    return _planes(b[..., 16:80], 2, 32), d * (scales & 0xF).float(), dmin * (scales >> 4).float()


def _q3_k(b: Tensor) -> Fields:
    low, high = b[..., 96:104], b[..., 104:108]
    six = _nibbles(low) | (_planes(high, 2, 4) << 4)
    codes = _planes(b[..., 32:96], 2, 32) | (_planes(b[..., :32], 1, 32) << 2)
    return codes, _half(b, 108).float() * (six.float() - 32), None


def _sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minimums, six bits each, of Q4_K and Q5_K: [..., 12] -> two [..., 8]."""
    first, second, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 0x3F, (rest & 0xF) | ((first >> 2) & 0x30)), -1)
    return scales.float(), torch.cat((second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)), -1).float()


def _q4_k(b: Tensor) -> Fields:
    scales, minimums = _sixes(b[..., 4:16])
    return _stream(b[..., 16:144], 32), _half(b, 0).float() * scales, _half(b, 2).float() * minimums


def _q5_k(b: Tensor) -> Fields:
    scales, minimums = _sixes(b[..., 4:16])
    codes = _planes(b[..., 48:176], 4, 32) | (_planes(b[..., 16:48], 1, 32) << 4)
    return codes, _half(b, 0).float() * scales, _half(b, 2).float() * minimums


def _q6_k(b: Tensor) -> Fields:
    codes = _planes(b[..., :128], 4, 64) | (_planes(b[..., 128:192], 2, 32) << 4)
    return codes, _half(b, 208).float() * b[..., 192:208].contiguous().view(torch.int8).float(), None


def _mxfp4(b: Tensor) -> Fields:
    return _stream(b[..., 1:], 16), b[..., :1], None


TYPES = {
    "Q4_0": BlockType(32, 18, "int4_g32", _q4_0),
    "Q4_1": BlockType(32, 20, "int4_g32_min", _q4_1),
    "Q5_0": BlockType(32, 22, "int5_g32", _q5_0),
    "Q5_1": BlockType(32, 24, "int5_g32_min", _q5_1),
    "Q8_0": BlockType(32, 34, "int8_g32", _q8_0),
    "Q2_K": BlockType(256, 84, "int2_g16_min", _q2_k),
    "Q3_K": BlockType(256, 110, "int3_g16", _q3_k),
    "Q4_K": BlockType(256, 144, "int4_g32_min", _q4_k),
    "Q5_K": BlockType(256, 176, "int5_g32_min", _q5_k),
    "Q6_K": BlockType(256, 210, "int6_g16", _q6_k),
    "MXFP4": BlockType(32, 17, "mxfp4", _mxfp4),
}
"""ggml's name of a type -> how it is read."""
