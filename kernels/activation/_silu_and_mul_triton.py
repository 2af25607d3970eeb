"""silu(gate) · up in Triton: one program per row and block of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, out_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x += row * x_stride
    gate = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + n + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, product.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, x: Tensor, out: Tensor) -> None:
    """x [..., 2N] -> out [..., N]."""
    n, block = out.shape[-1], int(config["block"])
    rows = out.numel() // n
    if rows:
        silu_and_mul_kernel[(rows, cdiv(n, block))](
            x, out, row_stride(x), row_stride(out), n, BLOCK=block, num_warps=config["warps"]
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: the block that long rows take, in bf16 and fp32."""
    sizes = {"x_stride": "i32", "out_stride": "i32", "n": "i32"}
    return [
        AotCase(
            name,
            silu_and_mul_kernel,
            {"x": f"*{name}", "out": f"*{name}"} | sizes,
            {"BLOCK": 1024},
            {"num_warps": 4},
        )
        for name in ("bf16", "fp32")
    ]
