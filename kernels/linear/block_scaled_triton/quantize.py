"""Rows of activations as MXFP8, MXFP4 or NVFP4 in Triton: the rules of `quant/activations.py`, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.activation._quantize_values_triton import magnitude_bits
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.kv_cache._e4m3_triton import e4m3_decode, e4m3_encode
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PARTS = 256
"""Programs that look for the largest magnitude of x; as many as `quantize_kernel` reads."""
BLOCK = 1024
"""Columns of a program."""
MIN_AMAX = 1e-10
"""Lower bound of the largest magnitude, as of `quant/activations.py`."""


class Operand(NamedTuple):
    """A format of codes.

    Attributes:
        name: as `tl.dot_scaled` calls it.
        group: columns that share a scale.
        packed: codes in a byte.
        emax: the exponent of the largest code; 0 = scales are e4m3.
    """

    name: str
    group: int
    packed: int
    emax: int


OPERANDS = {
    "mxfp8": Operand("e4m3", 32, 1, 8),
    "mxfp4": Operand("e2m1", 32, 2, 2),
    "nvfp4": Operand("e2m1", 16, 2, 0),
}


@jit
def e2m1_encode(x):
    """Codes 0 to 15 of float32 values: to nearest, ties to even, saturated at 6; the sign of zero is kept."""
    magnitude = tl.abs(x)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32) + (magnitude > 5.0).to(tl.int32)
    return (code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.uint8)


@jit
def maxima_kernel(x, maxima, rows, k, stride, BLOCK: tl.constexpr):
    """The largest magnitude of every PARTS-th row, as an integer in the order of magnitudes."""
    most = tl.zeros([BLOCK], tl.int32)
    first, programs = tl.program_id(0), tl.num_programs(0)
    row = x + first.to(tl.int64) * stride
    for _ in range(first, rows, programs):
        for start in range(0, k, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(row + columns, mask=columns < k, other=0.0)
            most = tl.maximum(most, magnitude_bits(values.to(tl.float32)))
        row += programs.to(tl.int64) * stride
    tl.store(maxima + tl.program_id(0), tl.max(most, 0))


@jit
def quantize_kernel(
    x,
    codes,
    scales,
    maxima,
    factor,
    k,
    stride,
    least,
    parts,
    GROUP: tl.constexpr,
    FP4: tl.constexpr,
    EMAX: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILED: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """A row's block of columns. EMAX: the exponent of the largest code; 0 = scales are e4m3, under a factor of the tensor (NVFP4).

    TILED: scales are in tiles of 128 rows by 4 groups, of which the last ones may have groups past K, with any number as scale. BY_ROW: NVFP4 has a
    factor for each row, of its own maximum."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < k, other=0.0).to(tl.float32)
    grouped = tl.reshape(values, [BLOCK // GROUP, GROUP])
    bits = tl.max(magnitude_bits(grouped), 1)
    if EMAX:
        byte = tl.maximum((bits >> 23) - EMAX, 0)
        byte = tl.where((bits >> 23) == 255, 255, byte)
        decoded = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
        scale = decoded.to(tl.float32, bitcast=True)
    else:
        if BY_ROW:
            most = tl.load(maxima + row).to(tl.float32, bitcast=True)
        else:
            part = tl.arange(0, PARTS)
            most = tl.max(tl.load(maxima + part, mask=part < parts, other=0), 0).to(tl.float32, bitcast=True)
        one = tl.zeros([BLOCK // GROUP], tl.float32)
        multiplier = tl.div_rn(one + tl.where(most < least, least, most), one + 2688.0)  # 6 times 448
        unrounded = tl.div_rn(bits.to(tl.float32, bitcast=True), multiplier * 6.0)
        byte = e4m3_encode(tl.where(unrounded < 0.001953125, 0.001953125, unrounded)).to(tl.int32)
        scale = e4m3_decode(byte.to(tl.uint8), tl.float32, False) * multiplier
        if BY_ROW:
            if tl.program_id(1) == 0:
                tl.store(factor + row, tl.max(multiplier, 0))
        elif tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(factor, tl.max(multiplier, 0))
    groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
    if TILED:
        across = (k // GROUP + 3) // 4
        tile = (row // 128 * across + groups // 4) * 512
        to = tile + row % 32 * 16 + row % 128 // 32 * 4 + groups % 4
        tl.store(scales + to, byte.to(tl.uint8), mask=groups < across * 4)
    else:
        tl.store(scales + row * (k // GROUP) + groups, byte.to(tl.uint8), mask=groups < k // GROUP)
    scaled = tl.div_rn(grouped, tl.broadcast_to(scale[:, None], grouped.shape))
    if FP4:
        low, high = tl.split(tl.reshape(e2m1_encode(scaled), [BLOCK // 2, 2]))
        packed = start // 2 + tl.arange(0, BLOCK // 2)
        tl.store(codes + row * (k // 2) + packed, low | (high << 4), mask=packed < k // 2)
    else:
        tl.store(codes + row * k + columns, tl.reshape(e4m3_encode(scaled), [BLOCK]), mask=columns < k)


def quantize(
    of_x: Operand,
    x: Tensor,
    m: int,
    k: int,
    codes: Tensor,
    scales: Tensor,
    factor: Tensor,
    tiled: bool = False,
    by_row: bool = False,
) -> None:
    """x's M rows [..., K] in a format.

    Args:
        codes: uint8, row-major. scales: uint8, row-major, or `tiled` as in scales128x4_v1, also of groups past K, not of rows past M.
        factor: of NVFP4, float32, with room for `PARTS` maxima after it; `by_row` M of them, with room for M maxima.
    """
    stride = row_stride(x)
    if stride < k:
        x, stride = x.reshape(m, k).contiguous(), k
    maxima, parts = scales, 0
    if not of_x.emax:
        maxima, parts = factor[m if by_row else 1 :].view(dtype=_int32()), m if by_row else min(m, PARTS)
        maxima_kernel[(parts,)](x, maxima, m, k, stride, BLOCK=BLOCK)
    quantize_kernel[(m, cdiv(k, BLOCK))](
        x,
        codes,
        scales,
        maxima,
        factor,
        k,
        stride,
        MIN_AMAX,
        parts,
        GROUP=of_x.group,
        FP4=of_x.packed == 2,
        EMAX=of_x.emax,
        PARTS=PARTS,
        BLOCK=BLOCK,
        TILED=tiled,
        BY_ROW=by_row,
    )


def _int32() -> torch.dtype:
    import torch

    return torch.int32


def maxima_case() -> AotCase:
    """The maxima of NVFP4, for the compile matrix."""
    types = {"x": "*bf16", "maxima": "*i32", "rows": "i32", "k": "i32", "stride": "i32"}
    return AotCase("maxima", maxima_kernel, types, {"BLOCK": BLOCK})


def aot_case(name: str, tiled: bool = False, by_row: bool = False) -> AotCase:
    """The quantizer of a format, for the compile matrix."""
    of_x = OPERANDS[name]
    types = {"x": "*bf16", "codes": "*u8", "scales": "*u8", "maxima": "*i32", "factor": "*fp32"}
    return AotCase(
        f"quantize_{name}{'_tiled' if tiled else ''}",
        quantize_kernel,
        types | {"k": "i32", "stride": "i32", "least": "fp32", "parts": "i32"},
        {
            "GROUP": of_x.group,
            "FP4": of_x.packed == 2,
            "EMAX": of_x.emax,
            "PARTS": PARTS,
            "BLOCK": BLOCK,
            "TILED": tiled,
            "BY_ROW": by_row,
        },
        {"num_warps": 4},
        ("k", "stride"),
    )
