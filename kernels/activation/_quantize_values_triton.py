"""8-bit codes and scales of values in Triton: the rules of `quant/activations.py`, bit for bit."""

from __future__ import annotations

from gristmill.kernels.kv_cache._e4m3_triton import e4m3_encode
from gristmill.kernels.lazy_triton import jit, tl


@jit
def magnitude_bits(x):
    """The magnitudes of float32 values as integers, which are in the same order; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(bits, least, top):
    """The scales of the largest magnitudes, as integers [G]: max(amax, least) / top."""
    amax = bits.to(tl.float32, bitcast=True)
    bounded = tl.where(amax < least, least, amax)
    return tl.div_rn(bounded, tl.zeros(bounded.shape, tl.float32) + top)


@jit
def code_of(x, scale, INT8: tl.constexpr):
    """The codes of float32 values by scales of the same shape: int8, or e4m3 as bytes."""
    scaled = tl.div_rn(x, scale)
    if INT8:
        # Adding 1.5 · 2²³ rounds to an integer, ties to even. The code of NaN is arbitrary: its scale is NaN.
        clamped = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
        code = ((clamped + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        code = e4m3_encode(scaled)
    return code


@jit
def quantize_block(
    x,
    columns,
    n,
    codes,
    scales,
    scale_stride,
    first,
    least,
    top,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Codes of x float32 [BLOCK], 0 past the row, at `columns` of a row of n, in groups of GROUP; the scales of the row are
    `scale_stride` apart, and `first` is the first group. If GIVEN, by the scale that is there."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    grouped = tl.reshape(x, [GROUPS, GROUP])
    if GIVEN:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(scales)
    else:
        scale = scale_of(tl.max(magnitude_bits(grouped), 1), least, top)
        index = tl.arange(0, GROUPS)
        starts = tl.min(tl.reshape(columns, [GROUPS, GROUP]), 1)
        tl.store(scales + (first + index) * scale_stride, scale, mask=starts < n)
    code = code_of(grouped, tl.broadcast_to(scale[:, None], grouped.shape), INT8)
    tl.store(codes + columns, tl.reshape(code, [BLOCK]), mask=columns < n)
