"""Dense products in CuTe DSL for data-centre Blackwell (`_product.py`).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Int32, cute

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import placeholder
from gristmill.kernels.linear.cutedsl_sm100._product import Product


def dense_product(config: Config) -> Source:
    """A program of (x [M, K], W [N, K], bias [N], residual [M, columns], out [M, columns], ctas). Without a bias or a residual, out stands in."""
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    product = DenseProduct(dtype, dtype, config, "none")
    m, n, k, columns = cute.sym_int32(), *(cute.sym_int32(divisibility=8) for _ in range(3))
    x, w = placeholder(dtype, m, k, align=16), placeholder(dtype, n, k, align=16)
    return Source(product, (x, w, *product.last_arguments(m, n, columns)))


class DenseProduct(Product):
    """The program of one configuration."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        bias: cute.Tensor,
        residual: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        """Launch `ctas` CTAs."""
        self.start(x, w, (), (bias, residual), out, ctas, stream)
