"""Products of e4m3 codes in CuTe DSL for data-centre Blackwell (`_product.py`).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float8E4M3FN, Int32, const_expr, cute

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.linear.cutedsl_sm100._codes import scaled_codes
from gristmill.kernels.linear.cutedsl_sm100._product import Product


def fp8_product(config: Config) -> Source:
    """A program of (x uint8 [M, K], W uint8 [N, K], x's scales float32 [M, groups of K or 1], W's float32 [block rows, groups] or [N, 1], the block
    row of each row of W int32 [N], bias [N], residual [M, columns], out [M, columns], ctas). Without blocks, W's scales stand in for block rows;
    without a bias or a residual, out does."""
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    product = Fp8Product(dtype, Float8E4M3FN, config, "blocks" if config["blocks"] else "rows")
    m, n, columns = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    codes = scaled_codes(m, n, product.blocks, align=16)
    return Source(product, (*codes, *product.last_arguments(m, n, columns)))


class Fp8Product(Product):
    """The program of one configuration."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        x_scales: cute.Tensor,
        w_scales: cute.Tensor,
        row_block: cute.Tensor,
        bias: cute.Tensor,
        residual: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        """Launch `ctas` CTAs."""
        x, w = cute.recast_tensor(x, Float8E4M3FN), cute.recast_tensor(w, Float8E4M3FN)
        scales = (x_scales, w_scales, row_block) if const_expr(self.blocks) else (x_scales, w_scales)
        self.start(x, w, scales, (bias, residual), out, ctas, stream)
