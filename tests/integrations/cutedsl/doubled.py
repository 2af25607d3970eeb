"""A small program: y = x + x, or 2 x y where the configuration says so."""

# No ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from gristmill.kernels.cutedsl import Source


def doubled(config) -> Source:
    """(x float32 [N], y float32 [N])."""
    squared = bool(config["squared"])

    @cute.kernel
    def kernel(x: cute.Tensor, y: cute.Tensor):
        at = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if at < x.shape[0]:
            y[at] = 2 * x[at] * y[at] if cutlass.const_expr(squared) else x[at] + x[at]

    @cute.jit
    def run(x: cute.Tensor, y: cute.Tensor, stream):
        kernel(x, y).launch(grid=(cute.ceil_div(x.shape[0], 128), 1, 1), block=(128, 1, 1), stream=stream)

    n = cute.sym_int32()
    vectors = (make_fake_tensor(cutlass.Float32, (n,), stride=(1,), assumed_align=4) for _ in range(2))
    return Source(run, tuple(vectors))
