"""Grouped linear in CuTe DSL for data-centre Blackwell: persistent CTAs, TMA, tcgen05, sums in tensor memory.

A CTA takes every `ctas`-th tile of 128 rows of one expert by BN rows of its W (`_cutedsl_tiles.py`). Warps 0 to 3 write tiles of y, warp 4
multiplies, warp 5 loads a ring of slots of 64 columns of K by TMA; where rows of x are gathered, warps 8 to 11 do it by cp.async. Tensor memory holds
the sums of two tiles, so that one is written while the next is computed. A lane of tensor memory is a row of y: each thread of the first four warps
finishes and writes one. Under silu_mul a tile of W is half gate and half up.

The roles of the warps are those of CUTLASS (Thakkar et al., 2023).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import (
    Slots,
    advance,
    allocate,
    eight,
    initialize,
    shared_tensor,
    swiglu,
)
from gristmill.kernels.cutedsl._sm100 import (
    BM,
    Operands,
    copy_halves,
    free_tensor_memory,
    multiply_part,
    part_reader,
    slots_by_tma,
)
from gristmill.kernels.moe.grouped_linear._cutedsl_tiles import Gather, Program, arguments, find, place

BK = 64
"""Columns of a slot, 128 bytes, the width of the swizzle."""
PART = 32
"""Columns of y that a thread finishes at a time."""
MULTIPLIER, LOADER, GATHERERS, WARPS = 4, 5, 8, 12
"""The warps that multiply, load and (from this one on) gather; and how many there are where rows are gathered."""


def grouped_linear(config: Config) -> Source:
    """A program of (x [rows, K], W [E, N, K], offsets [E + 1], permutation [P], bias [E, N], out [P, columns], top_k, ctas, alpha, limit)."""
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    return Source(GroupedLinear(dtype, config), arguments(dtype))


class GroupedLinear(Program):
    """The program of one configuration."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        offsets: cute.Tensor,
        permutation: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
        ctas: Int32,
        alpha: Float32,
        limit: Float32,
        stream,
    ):
        """Describe tiles, rings and TMA descriptors, and launch `ctas` CTAs."""
        operands = Operands(self.dtype, self.bn, BK, self.slots)
        w = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))
        self.kernel(
            (operands.mma, operands.half),
            operands.load_x(x),
            operands.load_w(w),
            (operands.x, operands.w, operands.halves),
            (x, permutation, top_k),
            offsets,
            (bias, alpha, limit),
            out,
        ).launch(
            grid=(ctas, 1, 1),
            block=(32 * (WARPS if self.gathered else LOADER + 1), 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mmas: tuple[cute.TiledMma, ...],
        load_x: tuple[cute.CopyAtom, cute.Tensor],
        load_w: tuple[cute.CopyAtom, cute.Tensor],
        layouts: tuple[cute.ComposedLayout, ...],
        gathering: tuple[cute.Tensor, cute.Tensor, Int32],
        offsets: cute.Tensor,
        ending: tuple[cute.Tensor, Float32, Float32],
        out: cute.Tensor,
    ):
        """The tiles of a CTA; then its share of the rows past those of the last expert, which are zero."""
        (mma, half), (ring_x, ring_w, halves), (x, permutation, top_k) = mmas, layouts, gathering
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = SmemAllocator()
        ring, sums = allocate(memory, self.slots), allocate(memory, 2)
        tensor_memory = memory.allocate_array(Int32, 1)
        sx, sw = shared_tensor(memory, self.dtype, ring_x), shared_tensor(memory, self.dtype, ring_w)
        if warp == 0:
            cute.arch.alloc_tmem(2 * self.bn, tensor_memory)
            cpasync.prefetch_descriptor(load_w[0])
            # One arrival for the bytes of TMA; one of each thread whose cp.async have landed.
            initialize(ring, self.slots, 1 + (128 if const_expr(self.gathered) else 0), 1)
            initialize(sums, 2, 1, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_memory)
        shape = cute.append(mma.partition_shape_C((BM, self.bn)), 2)
        tiles = cute.make_tensor(pointer, mma.make_fragment_C(shape).layout)

        steps = (x.shape[1] + BK - 1) // BK
        if warp < MULTIPLIER:
            self.write(tiles, sums, offsets, *ending, out)
            self.clear(offsets, out, cute.arch.thread_idx()[0], 128)
        elif warp == MULTIPLIER:
            self.multiply(mma, tiles, sx, sw, ring, sums, offsets, out, steps)
        elif warp == LOADER:
            both = cute.make_tensor(sw.iterator, halves.outer)
            self.load(mma, half, load_x, load_w, sx, both, ring, offsets, out, steps)
        if const_expr(self.gathered):  # noqa: SIM102  (this one is decided when it is compiled)
            if warp >= GATHERERS:
                self.gather(sx, ring, x, offsets, permutation, out, top_k, steps)
        free_tensor_memory(warp, pointer, 2 * self.bn)

    @cute.jit
    def load(
        self,
        mma: cute.TiledMma,
        half: cute.TiledMma,
        load_x: tuple[cute.CopyAtom, cute.Tensor],
        load_w: tuple[cute.CopyAtom, cute.Tensor],
        sx: cute.Tensor,
        sw: cute.Tensor,
        ring: Slots,
        offsets: cute.Tensor,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Fill slots with W, and with x unless its rows are gathered, by TMA."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        (tma_x, rows_x), (tma_w, rows_w) = load_x, load_w
        columns = out.shape[1]
        wide = (columns + self.columns - 1) // self.columns
        tile, slot, phase = Int32(cta), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, _, n0 = place(offsets, expert, BM, self.columns, tile - start)
            second = n0 + (columns if const_expr(self.gated) else self.bn // 2)
            here = cute.local_tile(cute.domain_offset((row0, 0), rows_x), (BM, BK), (0, None))
            to_x, from_x = slots_by_tma(tma_x, sx, mma.get_slice(0).partition_A(here))
            from_w = []
            for part in cutlass.range_constexpr(2):
                at = (n0 if const_expr(part == 0) else second, 0, expert)
                there = cute.local_tile(cute.domain_offset(at, rows_w), (self.bn // 2, BK), (0, None, 0))
                to_w, of_half = slots_by_tma(tma_w, sw, half.get_slice(0).partition_B(there))
                from_w.append(of_half)
            for step in range(steps):
                cute.arch.mbarrier_wait(ring.empty + slot, phase ^ 1)
                with cute.arch.elect_one():
                    rows = self.bn if const_expr(self.gathered) else self.bn + BM
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, rows * BK * 2)
                if const_expr(not self.gathered):
                    cute.copy(tma_x, from_x[None, step], to_x[None, slot], tma_bar_ptr=ring.full + slot)
                copy_halves(tma_w, from_w, to_w, step, slot, ring.full + slot)
                slot, phase = advance(slot, phase, self.slots)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def gather(
        self,
        sx: cute.Tensor,
        ring: Slots,
        x: cute.Tensor,
        offsets: cute.Tensor,
        permutation: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
        steps: Int32,
    ):
        """Fill slots with gathered rows of x by cp.async of 128 threads; eight copy the 128 bytes of a row."""
        thread = cute.arch.thread_idx()[0] - 32 * GATHERERS
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        wide = (out.shape[1] + self.columns - 1) // self.columns
        copy = Gather(sx, BM, x, thread)
        tile, slot, phase = Int32(cta), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, end, _ = place(offsets, expert, BM, self.columns, tile - start)
            sources = cute.make_rmem_tensor((BM // 16,), Int32)
            for i in cutlass.range_constexpr(BM // 16):
                # Past the expert's rows its last one is read again; those sums are not stored.
                sources[i] = permutation[cutlass.min(row0 + thread // 8 + 16 * i, end - 1)] // top_k
            for step in range(steps):
                cute.arch.mbarrier_wait(ring.empty + slot, phase ^ 1)
                copy(sources, end - row0, step, slot)
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + slot)
                slot, phase = advance(slot, phase, self.slots)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        tiles: cute.Tensor,
        sx: cute.Tensor,
        sw: cute.Tensor,
        ring: Slots,
        sums: Slots,
        offsets: cute.Tensor,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Multiply the slots, by one warp; tcgen05 tells when a slot has been read, and when a tile is done."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        wide = (out.shape[1] + self.columns - 1) // self.columns
        fragments_x, fragments_w = mma.make_fragment_A(sx), mma.make_fragment_B(sw)
        tile, slot, phase, stage, turn = Int32(cta), Int32(0), Int32(0), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            cute.arch.mbarrier_wait(sums.empty + stage, turn ^ 1)
            into = tiles[None, None, None, stage]
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in range(steps):
                cute.arch.mbarrier_wait(ring.full + slot, phase)
                if const_expr(self.gathered):  # tcgen05 reads by another proxy than cp.async writes by
                    cute.arch.fence_proxy("async.shared", space="cta")
                for part in cutlass.range_constexpr(BK // 16):
                    multiply_part(mma, into, fragments_x, fragments_w, part, slot)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(ring.empty + slot)
                slot, phase = advance(slot, phase, self.slots)
            with cute.arch.elect_one():
                tcgen05.commit(sums.full + stage)
            stage, turn = advance(stage, turn, 2)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def write(
        self,
        tiles: cute.Tensor,
        sums: Slots,
        offsets: cute.Tensor,
        bias: cute.Tensor,
        alpha: Float32,
        limit: Float32,
        out: cute.Tensor,
    ):
        """Finish and write tiles of y, a row each of 128 threads, `PART` columns at a time."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        columns = out.shape[1]
        wide = (columns + self.columns - 1) // self.columns
        read, sources, shape = part_reader(tiles, PART, thread)
        tile, stage, turn = Int32(cta), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, end, n0 = place(offsets, expert, BM, self.columns, tile - start)
            cute.arch.mbarrier_wait(sums.full + stage, turn)
            row = row0 + thread
            for part in cutlass.range_constexpr(self.columns // PART):
                n = n0 + part * PART
                y = cute.make_rmem_tensor((PART,), self.dtype)
                values = self.sums_of(read, sources, shape, part, stage, bias, expert, n)
                if const_expr(self.gated):
                    up = part + self.columns // PART
                    ups = self.sums_of(read, sources, shape, up, stage, bias, expert, n + columns)
                    for i in cutlass.range(PART, unroll_full=True):
                        y[i] = swiglu(values[i], ups[i], self.clamped, alpha, limit).to(self.dtype)
                else:
                    for i in cutlass.range(PART, unroll_full=True):
                        y[i] = values[i].to(self.dtype)
                for c in cutlass.range_constexpr(PART // 8):
                    if row < end and n + 8 * c < columns:
                        cute.autovec_copy(cute.local_tile(y, (8,), (c,)), eight(out, row, n + 8 * c))
            cute.arch.fence_view_async_tmem_load()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums.empty + stage)
            stage, turn = advance(stage, turn, 2)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def sums_of(
        self,
        read: cute.TiledCopy,
        sources: cute.Tensor,
        shape: cutlass.Constexpr,
        part: cutlass.Constexpr,
        stage: Int32,
        bias: cute.Tensor,
        expert: Int32,
        n: Int32,
    ):
        """This thread's sums of `PART` columns, from column n of W on, with their biases."""
        values = cute.make_rmem_tensor(shape, Float32)
        cute.copy(read, sources[None, None, None, part, stage], values)
        if const_expr(self.biased):
            for i in cutlass.range(PART, unroll_full=True):
                values[i] += bias[expert, cutlass.min(n + i, bias.shape[1] - 1)].to(Float32)
        return values
