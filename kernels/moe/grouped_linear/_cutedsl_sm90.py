"""Grouped linear in CuTe DSL for Hopper: persistent CTAs, TMA, wgmma, the epilogue in registers.

A CTA takes every `ctas`-th tile of BM rows of one expert by BN rows of its W (`_cutedsl_tiles.py`). Warpgroup 0 fills a ring of slots of
64 columns of K: W by TMA, x by TMA or, where its rows are gathered, by cp.async; the others multiply, one group of wgmma in flight. Under silu_mul
a tile of W is half gate and half up, which meet in the registers of one thread.

The schedule of warp-specialized persistent tiles is that of CUTLASS (Thakkar et al., 2023).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import advance, allocate, initialize, shared_tensor, swiglu
from gristmill.kernels.cutedsl._sm90 import LOADERS, Store, ring_layout, tile_layout, wgmma
from gristmill.kernels.moe.grouped_linear._cutedsl_tiles import Gather, Program, arguments, find, place

BK = 64
"""Columns of a slot: 128 bytes, the width of the swizzle."""
FEW = 16
"""Rows of x that TMA copies at a time where a tile has 64: an expert of few rows has no others read, beside which its weights would wait."""
REGISTERS = 64 * 1024
"""Of a multiprocessor, and so of a CTA."""


def grouped_linear(config: Config) -> Source:
    """A program of (x [rows, K], W [E, N, K], offsets [E + 1], permutation [P], bias [E, N], out [P, columns], top_k, ctas, alpha, limit)."""
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    return Source(GroupedLinear(dtype, config), arguments(dtype))


class GroupedLinear(Program):
    """The program of one configuration.

    Attributes:
        bm: rows of x of a tile.
        groups: warpgroups that multiply, 64 rows of a tile each.
        box: rows of x that TMA copies at a time.
        registers: of a thread that loads, and of one that multiplies; the increase waits forever if a CTA has fewer than all of them.
    """

    def __init__(self, dtype, config: Config):
        super().__init__(dtype, config)
        self.bm = int(config["bm"])
        self.groups = self.bm // 64
        self.box = FEW if self.bm == 64 else self.bm
        load = 72 if self.gathered else 40
        self.registers = (load, min(240, (REGISTERS // 128 - load) // self.groups // 8 * 8))

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
        ring_x = ring_layout(self.dtype, self.bm, BK, self.slots)
        ring_w = ring_layout(self.dtype, self.bn, BK, self.slots)
        w = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_x, x_by_tma = cpasync.make_tiled_tma_atom(
            load,
            x,
            cute.slice_(ring_layout(self.dtype, self.box, BK, 1), (None, None, 0)),
            (self.box, BK),
        )
        # W comes in halves: gate and up are N / 2 rows apart.
        half = cute.slice_(ring_layout(self.dtype, self.bn // 2, BK, 1), (None, None, 0))
        tma_w, w_by_tma = cpasync.make_tiled_tma_atom(load, w, half, (self.bn // 2, BK))
        self.kernel(
            wgmma(self.dtype, self.groups, self.bn),
            wgmma(self.dtype, self.groups, self.columns),
            tma_x,
            x_by_tma,
            tma_w,
            w_by_tma,
            ring_x,
            ring_w,
            tile_layout(self.dtype, self.bm, self.columns),
            x,
            offsets,
            permutation,
            bias,
            out,
            top_k,
            alpha,
            limit,
        ).launch(
            grid=(ctas, 1, 1),
            block=(LOADERS + self.groups * 128, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        mma_out: cute.TiledMma,
        tma_x: cute.CopyAtom,
        x_by_tma: cute.Tensor,
        tma_w: cute.CopyAtom,
        w_by_tma: cute.Tensor,
        ring_x: cute.ComposedLayout,
        ring_w: cute.ComposedLayout,
        tile_out: cute.ComposedLayout,
        x: cute.Tensor,
        offsets: cute.Tensor,
        permutation: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
        alpha: Float32,
        limit: Float32,
    ):
        """The tiles of a CTA; then its share of the rows past those of the last expert, which are zero."""
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        memory = SmemAllocator()
        barriers = allocate(memory, self.slots)
        sx, sw = shared_tensor(memory, self.dtype, ring_x), shared_tensor(memory, self.dtype, ring_w)
        so = shared_tensor(memory, self.dtype, tile_out)
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_w)
            # One arrival for the bytes of TMA; one of each thread whose cp.async have landed.
            arrivals = 1 + (LOADERS if const_expr(self.gathered) else 0)
            initialize(barriers, self.slots, arrivals, 4 * self.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp_index < LOADERS // 32:
            cute.arch.setmaxregister_decrease(self.registers[0])
            self.load(
                tma_x, x_by_tma, tma_w, w_by_tma, sx, sw, *barriers, x, offsets, permutation, out, top_k
            )
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            steps = (x_by_tma.shape[1] + BK - 1) // BK
            self.multiply(mma, mma_out, sx, sw, so, *barriers, offsets, bias, out, steps, alpha, limit)

            self.clear(offsets, out, thread - LOADERS, self.groups * 128)

    @cute.jit
    def load(
        self,
        tma_x: cute.CopyAtom,
        x_by_tma: cute.Tensor,
        tma_w: cute.CopyAtom,
        w_by_tma: cute.Tensor,
        sx: cute.Tensor,
        sw: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        x: cute.Tensor,
        offsets: cute.Tensor,
        permutation: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
    ):
        """What warpgroup 0 does: fill the slots, tile after tile."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        columns = out.shape[1]
        wide = (columns + self.columns - 1) // self.columns
        steps = (x_by_tma.shape[1] + BK - 1) // BK
        whole = cute.make_layout(1)
        gather = Gather(sx, self.bm, x, thread)

        tile, slot, phase = Int32(cta), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, self.bm, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, end, n0 = place(offsets, expert, self.bm, self.columns, tile - start)
            second = n0 + (columns if const_expr(self.gated) else self.bn // 2)
            from_w, to_w, from_x, to_x = [], [], [], []
            for half in cutlass.range_constexpr(2):
                rows = cute.domain_offset((n0 if const_expr(half == 0) else second, 0, expert), w_by_tma)
                shared_half, half_of_w = cpasync.tma_partition(
                    tma_w,
                    0,
                    whole,
                    cute.group_modes(cute.local_tile(sw, (self.bn // 2, BK), (half, 0, None)), 0, 2),
                    cute.group_modes(cute.local_tile(rows, (self.bn // 2, BK), (0, None, 0)), 0, 2),
                )
                to_w.append(shared_half)
                from_w.append(half_of_w)
            if const_expr(self.gathered):
                sources = cute.make_rmem_tensor((self.bm // 16,), Int32)
                for i in cutlass.range_constexpr(self.bm // 16):
                    # Past the expert's rows its last one stands in, which is not copied.
                    row = cutlass.min(row0 + thread // 8 + 16 * i, end - 1)
                    sources[i] = permutation[row] // top_k
            else:
                boxes = cutlass.min((end - row0 + self.box - 1) // self.box, self.bm // self.box)
                rows_of_x = cute.domain_offset((row0, 0), x_by_tma)
                for box in cutlass.range_constexpr(self.bm // self.box):
                    shared_box, box_of_x = cpasync.tma_partition(
                        tma_x,
                        0,
                        whole,
                        cute.group_modes(cute.local_tile(sx, (self.box, BK), (box, 0, None)), 0, 2),
                        cute.group_modes(cute.local_tile(rows_of_x, (self.box, BK), (box, None)), 0, 2),
                    )
                    to_x.append(shared_box)
                    from_x.append(box_of_x)
            for step in range(steps):
                cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                if warp_index == 0:
                    with cute.arch.elect_one():
                        landing = self.bn if const_expr(self.gathered) else self.bn + boxes * self.box
                        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, landing * BK * 2)
                    if const_expr(not self.gathered):
                        for box in cutlass.range_constexpr(self.bm // self.box):
                            if box < boxes:
                                cute.copy(
                                    tma_x,
                                    from_x[box][None, step],
                                    to_x[box][None, slot],
                                    tma_bar_ptr=full + slot,
                                )
                    for half in cutlass.range_constexpr(2):
                        cute.copy(
                            tma_w,
                            from_w[half][None, step],
                            to_w[half][None, slot],
                            tma_bar_ptr=full + slot,
                        )
                if const_expr(self.gathered):
                    gather(sources, end - row0, step, slot)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + slot)
                slot, phase = advance(slot, phase, self.slots)
            tile += ctas
            expert, start, first, before = find(offsets, self.bm, wide, tile, first, before)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        mma_out: cute.TiledMma,
        sx: cute.Tensor,
        sw: cute.Tensor,
        so: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        offsets: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        steps: Int32,
        alpha: Float32,
        limit: Float32,
    ):
        """What the other warpgroups do: sums of the slots, the epilogue, y."""
        thread = cute.arch.thread_idx()[0] - LOADERS
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        columns = out.shape[1]
        wide = (columns + self.columns - 1) // self.columns
        group = cute.arch.make_warp_uniform(thread // 128)
        own = mma.get_slice(cute.make_layout(self.groups, stride=128)(group))
        fragments_x = mma.make_fragment_A(own.partition_A(sx))
        fragments_w = mma.make_fragment_B(own.partition_B(sw))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((self.bm, self.bn)), Float32)
        store = Store(self.dtype, mma_out, so, thread, self.groups)

        mma.set(warpgroup.Field.ACCUMULATE, True)
        tile, slot, phase = Int32(cta), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, self.bm, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, end, n0 = place(offsets, expert, self.bm, self.columns, tile - start)
            sums.fill(0.0)
            previous = slot
            for step in range(steps):
                cute.arch.mbarrier_wait(full + slot, phase)
                if const_expr(self.gathered):  # wgmma reads by another proxy than cp.async writes by
                    cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup.fence()
                for part in cutlass.range_constexpr(BK // 16):
                    cute.gemm(
                        mma,
                        sums,
                        fragments_x[None, None, part, slot],
                        fragments_w[None, None, part, slot],
                        sums,
                    )
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if step > 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + previous)
                previous = slot
                slot, phase = advance(slot, phase, self.slots)
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + previous)

            y = cute.make_rmem_tensor(mma_out.partition_shape_C((self.bm, self.columns)), self.dtype)
            places = mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.bm, self.bn)))
            self.finish(sums, y, bias, places, expert, n0, columns, alpha, limit)
            store(y, cute.domain_offset((row0, n0), out), end - row0, columns - n0)
            tile += ctas
            expert, start, first, before = find(offsets, self.bm, wide, tile, first, before)

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        y: cute.Tensor,
        bias: cute.Tensor,
        places: cute.Tensor,
        expert: Int32,
        n0: Int32,
        columns: Int32,
        alpha: Float32,
        limit: Float32,
    ):
        """Add biases, apply the activation, round. Gate and up of a column are half of a thread's sums apart. places: of its sums in the tile."""
        if const_expr(self.biased):
            for i in cutlass.range_constexpr(cute.size(sums) // 4):
                for column in cutlass.range_constexpr(2):  # two of two rows
                    n = n0 + places[4 * i + column][1]
                    if const_expr(self.gated and 4 * i >= cute.size(sums) // 2):
                        n += columns - self.columns
                    added = bias[expert, cutlass.min(n, bias.shape[1] - 1)].to(Float32)
                    sums[4 * i + column] += added
                    sums[4 * i + column + 2] += added
        if const_expr(self.gated):
            for i in cutlass.range(cute.size(y), unroll_full=True):
                value = swiglu(sums[i], sums[i + cute.size(y)], self.clamped, alpha, limit)
                y[i] = value.to(self.dtype)
        else:
            y.store(sums.load().to(self.dtype))
