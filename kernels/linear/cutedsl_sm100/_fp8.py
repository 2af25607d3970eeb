"""Products of e4m3 codes in CuTe DSL for data-centre Blackwell (`_product.py`).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import placeholder
from gristmill.kernels.linear.cutedsl_sm100._product import Product


def fp8_product(config: Config) -> Source:
    """A program of (x uint8 [M, K], W uint8 [N, K], x's scales float32 [M, groups of K or 1], W's float32 [block rows, groups] or [N, 1], the block
    row of each row of W int32 [N], bias [N], residual [M, columns], out [M, columns], ctas). Without blocks, W's scales stand in for block rows;
    without a bias or a residual, out does."""
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    product = Fp8Product(dtype, Float8E4M3FN, config, "blocks" if config["blocks"] else "rows")
    m, n, columns = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    k, groups = cute.sym_int32(divisibility=16), cute.sym_int32()
    x, w = (placeholder(Uint8, rows, k, align=16) for rows in (m, n))
    # The scales of all rows of a group lie behind each other.
    of_x = make_fake_tensor(
        Float32, (m, groups), stride=(1, cute.sym_int64(divisibility=4)), assumed_align=16
    )
    of_w = placeholder(Float32, cute.sym_int32(), cute.sym_int32(), align=4)
    row_block = placeholder(Int32, n, align=4) if product.blocks else of_w
    return Source(product, (x, w, of_x, of_w, row_block, *product.last_arguments(m, n, columns)))


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
