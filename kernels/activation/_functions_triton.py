"""The functions of `activation` in Triton, in float32."""

from __future__ import annotations

from gristmill.kernels.activation._gelu_triton import gelu_share
from gristmill.kernels.activation.activation import FUNCTIONS
from gristmill.kernels.activation.gelu_and_mul import CUBE, TWICE_ROOT
from gristmill.kernels.lazy_triton import jit, tl


def constants(function: str) -> dict[str, float | int]:
    """The constants of a kernel that calls `activated` with them."""
    return {"TWICE_ROOT": TWICE_ROOT, "CUBE": CUBE, "FUNCTION": FUNCTIONS.index(function)}


@jit
def activated(v, TWICE_ROOT: tl.constexpr, CUBE: tl.constexpr, FUNCTION: tl.constexpr):
    """f(v), f being the function of number FUNCTION."""
    if FUNCTION >= 3:
        y = tl.where(v < 0.0, 0.0, v)  # NaN stays NaN
        if FUNCTION == 4:
            y = y * y
    else:
        if FUNCTION == 0:
            share = gelu_share(v)
        elif FUNCTION == 1:
            share = 1.0 / (1.0 + tl.exp(-TWICE_ROOT * (v + CUBE * v * v * v)))
        else:
            share = 1.0 / (1.0 + tl.exp(-v))
        y = tl.where(share == 0.0, share, v * share)  # a product of infinity and 0 is 0, as the limit
    return y
