"""The end of tiles of block-scaled products on data-centre Blackwell: factors, bias, silu_mul and residual, from tensor memory to y.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, const_expr, cute

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl._pieces import Slots, advance, eight, swiglu
from gristmill.kernels.cutedsl._sm100 import BM, part_reader
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import (
    FORMS,
    PART,
    awaited,
    part_of,
    tensor_memory,
)


class Finish:
    """What the program of one configuration multiplies, and what it does with sums.

    Attributes:
        bn: rows of W of a tile. columns: of y, BN or half of it. bk: columns of a slot. slots: of the ring.
        gated, clamped, biased, added, factored: what is done with sums; linear never clamps.
        group: columns of a scale.
        memory: where sums and scales are in tensor memory.
    """

    def __init__(self, dtype, config: Config):
        self.dtype = dtype
        self.form = FORMS[str(config["scheme"])]
        self.bn, self.slots, self.bk = int(config["bn"]), int(config["slots"]), self.form.columns
        flags = str(config["epilogue"]).split("+")
        self.gated, self.biased, self.added = (flag in flags for flag in ("silu_mul", "bias", "residual"))
        self.clamped = "clamp" in flags
        self.columns = self.bn // 2 if self.gated else self.bn
        self.group, self.factored = self.form.group, self.form.group == 16
        types = {"e2m1": Float4E2M1FN, "e4m3": Float8E4M3FN}
        self.of_x, self.of_w = types[self.form.x], types[self.form.w]
        # Codes of 4 bits by codes of 8: TMA spreads them to bytes.
        self.held_w = cutlass.Int8 if self.form.mixed else self.of_w
        self.of_scales = Float8E4M3FN if self.factored else Float8E8M0FNU
        self.memory = tensor_memory(self.bn)

    def grid(self, out: cute.Tensor):
        """Tiles down and across y."""
        return (out.shape[0] + BM - 1) // BM, (out.shape[1] + self.columns - 1) // self.columns

    @cute.jit
    def write(
        self,
        tiles: cute.Tensor,
        sums: Slots,
        factor: cute.Tensor,
        factors: cute.Tensor,
        bias: cute.Tensor,
        residual: cute.Tensor,
        out: cute.Tensor,
    ):
        """Finish and write tiles of y, a row each of 128 threads, `PART` columns at a time."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        high, wide = self.grid(out)
        read, sources, shape = part_reader(tiles, PART, thread)
        of_x, one = factor[0] if const_expr(self.factored) else Float32(1), Float32(1)
        tile, stage, turn = Int32(cta), Int32(0), Int32(0)
        while tile < high * wide:
            row = tile % high * BM + thread
            n0 = cute.assume(tile // high * self.columns, divby=self.columns)
            cute.arch.mbarrier_wait(sums.full + stage, turn)
            at, own = (row, out.shape[0], n0, Int32(0)), (of_x, one, one)
            self.write_tile(read, sources, shape, sums, stage, at, own, (factors, bias, residual), out)
            stage, turn = advance(stage, turn, 2)
            tile += ctas

    @cute.jit
    def write_tile(
        self,
        read: cute.TiledCopy,
        sources: cute.Tensor,
        shape: cutlass.Constexpr,
        sums: Slots,
        stage: Int32,
        at: tuple[Int32, ...],
        own: tuple[Float32, ...],
        ending: tuple[cute.Tensor, ...],
        out: cute.Tensor,
    ):
        """Finish and write this thread's row of a tile whose sums are there.

        Args:
            at: the row of y, the end of rows that are written, the first column, and what its index in factors and biases has more.
            own: the factor of this row of x; alpha and limit of clamped gates.
            ending: factors and biases of rows of W, the residual.
        """
        (row, end, n0, base), (of_x, alpha, limit), (factors, bias, residual) = at, own, ending
        columns, parts, shared = out.shape[1], const_expr(self.columns // PART), self.memory.shared
        for index in cutlass.range_constexpr(parts):
            part = part_of(index, stage, parts, shared)
            n = n0 + part * PART
            values = cute.make_rmem_tensor(shape, Float32)
            cute.copy(read, sources[None, None, None, part, stage], values)
            if const_expr(self.gated):
                ups = cute.make_rmem_tensor(shape, Float32)
                cute.copy(read, sources[None, None, None, part + parts, stage], ups)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(index + 1 == awaited(parts, shared)):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(sums.empty + stage)
            for c in cutlass.range_constexpr(PART // 8):
                first = n + 8 * c
                if row < end and first < columns:
                    y = cute.make_rmem_tensor((8,), self.dtype)
                    added = cute.make_rmem_tensor((8,), self.dtype)
                    if const_expr(self.added):
                        cute.autovec_copy(eight(residual, row, first), added)
                    for i in cutlass.range_constexpr(8):
                        of_w = first + base + i
                        value = self.finished(values[8 * c + i], of_w, of_x, factors, bias)
                        if const_expr(self.gated):
                            up = self.finished(ups[8 * c + i], of_w + columns, of_x, factors, bias)
                            value = swiglu(value, up, self.clamped, alpha, limit)
                        if const_expr(self.added):
                            value += added[i].to(Float32)
                        y[i] = value.to(self.dtype)
                    cute.autovec_copy(y, eight(out, row, first))

    def finished(self, value: Float32, n: Int32, of_x: Float32, factors: cute.Tensor, bias: cute.Tensor):
        """A sum of row n of W, times factors, plus its bias."""
        if self.factored:
            value *= factors[n] * of_x
        if self.biased:
            value += bias[n].to(Float32)
        return value
