"""e4m3 codes in Triton, as bytes: every target and the interpreter decode and encode them alike, bit for bit."""

from __future__ import annotations

from gristmill.kernel_registry.target import Target
from gristmill.kernels.lazy_triton import jit, tl


def has_e4m3(target: Target) -> bool:
    """Whether Triton converts e4m3 by the target's own instruction."""
    return "fp8.ocp" in target.features


@jit
def e4m3_decode(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """The values of uint8 codes in `dtype`, exactly; NATIVE: by the target's conversion, else by integer arithmetic."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
    # The same bits as a float16 whose exponent is too small by 8, subnormals included.
    magnitude = codes.to(tl.int16) & 0x7F
    bits = ((codes.to(tl.int16) & 0x80) << 8) | (magnitude << 7)
    value = (bits.to(tl.float16, bitcast=True) * 256.0).to(tl.float32)
    return tl.where(magnitude == 0x7F, float("nan"), value).to(dtype)


@jit
def e4m3_encode(x):
    """uint8 codes of float32 values: to nearest, ties to even, saturated at 448; NaN is 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the last place of a float32 of 2^14.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)
