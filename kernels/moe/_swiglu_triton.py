"""The activation of gate and up in Triton, of the kernels of experts."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import jit, tl


@jit
def swiglu(gate, up, alpha, limit, CLAMP: tl.constexpr):
    """silu(gate) · up in float32; with CLAMP g · sigmoid(alpha · g) · (u + 1), g = min(gate, limit) and u = up within -limit .. limit."""
    if CLAMP:
        # Comparisons with NaN are false, so that NaN passes, as in torch's clamp.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
        y = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y
