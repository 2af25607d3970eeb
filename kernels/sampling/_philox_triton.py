"""Philox4x32-10 and Gumbel noise in Triton: exact in float64, and a float32 stand-in that finds who can win."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import jit, tl


@jit
def philox_words(seed, index, token):
    """The first two words of Philox4x32-10: key = seed, counter = (index low, index high, token, 0)."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    zero = (token * 0).to(tl.uint32)
    c0, c1, c2, c3 = zero + index.to(tl.uint32), zero + (index >> 32).to(tl.uint32), token.to(tl.uint32), zero
    m0 = (token * 0).to(tl.uint64) + 0xD2511F53
    m1 = (token * 0).to(tl.uint64) + 0xCD9E8D57
    w0 = zero + 0x9E3779B9
    w1 = zero + 0xBB67AE85
    k0, k1 = zero + k0, zero + k1
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * m0
        p1 = c2.to(tl.uint64) * m1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 += w0
        k1 += w1
    return c0, c1


@jit
def gumbel(seed, index, token):
    """float64 Gumbel noise from 52 bits, -log(-log(u)) with u an odd multiple of 2^-53."""
    w0, w1 = philox_words(seed, index, token)
    bits = (w0.to(tl.int64) << 20) | (w1.to(tl.int64) >> 12)
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@jit
def rough_gumbel(seed, index, token):
    """The same noise in float32, within 1e-4 of `gumbel` everywhere, both tails included.

    -log(u) comes from u below 1/2 and from c = 1 - u above, whose bits are the complement of u's; a float32 u near 1 would
    have lost them. Near c = 0 the series of -log(1 - c).
    """
    w0, w1 = philox_words(seed, index, token)
    high = w0 >= 0x80000000
    w0 = tl.where(high, ~w0, w0)
    w1 = tl.where(high, ~w1, w1)
    part = (
        w0.to(tl.float32) * 2.3283064365386963e-10 + ((w1 >> 12).to(tl.float32) + 0.5) * 2.220446049250313e-16
    )
    series = part * (1.0 + part * (0.5 + part * (0.3333333333 + part * 0.25)))
    # Base 2: the logarithm that GPUs have an instruction for.
    direct = tl.log2(tl.where(high, 1.0 - part, part)) * -0.6931471805599453
    return tl.log2(tl.where(high & (part < 0.015625), series, direct)) * -0.6931471805599453
