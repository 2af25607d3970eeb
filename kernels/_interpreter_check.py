"""The kernel that `gristmill.kernels.interpreter.check` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def probe_kernel(a, b, total, product, rounded, eighth, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    left, right = tl.load(a + places), tl.load(b + places)
    tl.store(total + places, left + right)
    tl.store(product + places, tl.dot(left, right))
    tl.store(rounded + places, (left.to(tl.float32) * right.to(tl.float32)).to(tl.bfloat16))
    tl.store(eighth + places, (left.to(tl.float32) * 7).to(tl.float8e4nv))


def run(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Results of the probe on two [16, 16] bf16 tensors."""
    import torch

    results = {
        "bf16 addition": torch.empty_like(a),
        "bf16 matrix product": torch.empty(16, 16, dtype=torch.float32),
        "rounding to bf16": torch.empty_like(a),
        "rounding to fp8": torch.empty(16, 16, dtype=torch.float8_e4m3fn),
    }
    probe_kernel[(1,)](a, b, *results.values(), N=16)
    return results
