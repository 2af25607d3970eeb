"""The distribution function of the normal distribution in Triton, which gelu multiplies with."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import constexpr, jit, tl

ROOT_HALF = constexpr(0.7071067811865476)


@jit
def gelu_share(x):
    """Φ(x) = erfc(-x / √2) / 2 in float32 with a relative error that does not grow for negative x: for a >= 0
    erfc(a) = t P(t) e^(-a²), t = 1 / (1 + a / 2), as in `_activation_cpu.cpp`."""
    a = tl.abs(x)
    a = tl.where(a > 15.0, 15.0, a) * ROOT_HALF  # NaN passes through
    t = 1.0 / (1.0 + 0.5 * a)
    p = -0.05938642472028732 * t + 0.2861238420009613
    p = p * t - 0.49040618538856506
    p = p * t + 0.2817331850528717
    p = p * t - 0.029148561879992485
    p = p * t + 0.2037525773048401
    p = p * t + 0.24283508956432343
    p = p * t + 0.2824121117591858
    p = p * t + 0.2820843458175659
    tail = 0.5 * t * p * tl.exp(-a * a)
    return tl.where(x > 0.0, 1.0 - tail, tail)
