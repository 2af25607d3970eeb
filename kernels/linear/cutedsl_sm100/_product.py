"""Products of rows of x and rows of W in CuTe DSL for data-centre Blackwell: persistent CTAs, TMA, tcgen05, sums in tensor memory.

A CTA takes every `ctas`-th tile of 128 rows of x by BN rows of W. One warp loads a ring of slots of 128 bytes of every row by TMA, one multiplies
them, the others finish tiles (`_finish.py`). Tensor memory has room for several products, so that some are read while the next is computed: for those
of tiles, or, where every 128 columns have scales of their own, for those of slots, which are added up in registers (DeepSeek-V3's two-level
accumulation; DeepSeek-AI, 2024). Under silu_mul a tile of W is half gate and half up.

The roles of the warps are those of CUTLASS (Thakkar et al., 2023).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from gristmill.kernels.cutedsl._pieces import Slots, advance, allocate, initialize, shared_tensor
from gristmill.kernels.cutedsl._sm100 import (
    BM,
    Operands,
    copy_halves,
    free_tensor_memory,
    multiply_part,
    slots_by_tma,
)
from gristmill.kernels.linear.cutedsl_sm100._finish import LANES, Finish
from gristmill.kernels.linear.cutedsl_sm100.shapes import SLOT_BYTES

LEAST, MOST = 40, 232
"""Registers of a thread that loads or multiplies, and of one of two quads that add up slots: 65,536 are for three quads."""


class Product(Finish):
    """The program of one configuration."""

    @cute.jit
    def start(self, x, w, scales, ending, out: cute.Tensor, ctas: Int32, stream):
        """Describe tiles, rings and TMA descriptors, and launch `ctas` CTAs. scales: of x, of W, block rows. ending: bias, residual."""
        operands = Operands(self.operand, self.bn, self.bk, self.slots)
        load_x, load_w = operands.load_x(x), operands.load_w(w)
        staging = blackwell_helpers.make_smem_layout_epi(
            self.dtype, LayoutEnum.ROW_MAJOR, (LANES, self.width), self.finishers
        )
        store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, cute.slice_(staging, (None, None, 0)), (LANES, self.width)
        )
        load_scales = store
        if const_expr(self.blocks):
            load_scales = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), scales[0], cute.make_layout((BM, 1)), (BM, 1)
            )
        self.kernel(
            (operands.mma, operands.half),
            load_x,
            load_w,
            load_scales,
            store,
            (operands.x, operands.w, operands.halves, staging),
            scales,
            ending,
            out,
        ).launch(
            grid=(ctas, 1, 1),
            block=(32 * (self.finishers + 4), 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mmas: tuple[cute.TiledMma, ...],
        load_x: tuple[cute.CopyAtom, cute.Tensor],
        load_w: tuple[cute.CopyAtom, cute.Tensor],
        load_scales: tuple[cute.CopyAtom, cute.Tensor],
        store: tuple[cute.CopyAtom, cute.Tensor],
        layouts: tuple[cute.ComposedLayout, ...],
        scales: tuple[cute.Tensor, ...],
        ending: tuple[cute.Tensor, ...],
        out: cute.Tensor,
    ):
        """The tiles of a CTA, rows of x fastest, so that CTAs that run at the same time share W. A load is a TMA atom and what it copies from."""
        (mma, half), (ring_x, ring_w, halves, staging) = mmas, layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = SmemAllocator()
        ring, sums = allocate(memory, self.slots), allocate(memory, self.stages)
        of_x = allocate(memory, self.of_slots)
        tensor_memory = memory.allocate_array(Int32, 1)
        sx, sw = shared_tensor(memory, self.operand, ring_x), shared_tensor(memory, self.operand, ring_w)
        so = shared_tensor(memory, self.dtype, staging)
        ss = memory.allocate_tensor(Float32, cute.make_layout((BM, self.of_slots)), byte_alignment=128)
        if warp == 0:
            cute.arch.alloc_tmem(self.stages * self.bn, tensor_memory)
            for atom in (load_x[0], load_w[0], load_scales[0], store[0]):
                cpasync.prefetch_descriptor(atom)
            initialize(ring, self.slots, 1, 1)
            initialize(sums, self.stages, 1, self.finishers)
            initialize(of_x, self.of_slots, 1, self.finishers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_memory)
        shape = cute.append(mma.partition_shape_C((BM, self.bn)), self.stages)
        products = cute.make_tensor(pointer, mma.make_fragment_C(shape).layout)

        steps = (load_x[1].shape[1] + self.bk - 1) // self.bk
        if warp < self.finishers:
            if const_expr(self.quads > 1):
                cute.arch.setmaxregister_increase(MOST)
            self.finish(products, sums, of_x, ss, so, store, scales, ending, out, steps)
        else:
            if const_expr(self.quads > 1):
                cute.arch.setmaxregister_decrease(LEAST)
            if warp == self.finishers:
                self.multiply(mma, products, sx, sw, ring, sums, out, steps)
            elif warp == self.finishers + 1:
                both = cute.make_tensor(sw.iterator, halves.outer)
                self.load(mma, half, load_x, load_w, load_scales, sx, both, ss, ring, of_x, out, steps)
        free_tensor_memory(warp, pointer, self.stages * self.bn)

    @cute.jit
    def load(
        self,
        mma: cute.TiledMma,
        half: cute.TiledMma,
        load_x: tuple[cute.CopyAtom, cute.Tensor],
        load_w: tuple[cute.CopyAtom, cute.Tensor],
        load_scales: tuple[cute.CopyAtom, cute.Tensor],
        sx: cute.Tensor,
        sw: cute.Tensor,
        ss: cute.Tensor,
        ring: Slots,
        of_x: Slots,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Fill slots with x, W and the scales of x by TMA, by one warp."""
        tile, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        (tma_x, rows_x), (tma_w, rows_w), (tma_s, rows_s) = load_x, load_w, load_scales
        whole, count = cute.make_layout(1), self.tiles(out)
        slot, phase, place, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        while tile < count:
            m0, n0 = self.place(tile, out)
            second = n0 + (out.shape[1] if const_expr(self.gated) else self.bn // 2)
            here = cute.local_tile(cute.domain_offset((m0, 0), rows_x), (BM, self.bk), (0, None))
            to_x, from_x = slots_by_tma(tma_x, sx, mma.get_slice(0).partition_A(here))
            from_w = []
            for part in cutlass.range_constexpr(2):
                at = (n0 if const_expr(part == 0) else second, 0)
                there = cute.local_tile(cute.domain_offset(at, rows_w), (self.bn // 2, self.bk), (0, None))
                to_w, of_half = slots_by_tma(tma_w, sw, half.get_slice(0).partition_B(there))
                from_w.append(of_half)
            if const_expr(self.blocks):
                of_rows = cute.local_tile(cute.domain_offset((m0, 0), rows_s), (BM, 1), (0, None))
                to_s, from_s = cpasync.tma_partition(
                    tma_s, 0, whole, cute.group_modes(ss, 0, 1), cute.group_modes(of_rows, 0, 2)
                )
            for step in range(steps):
                cute.arch.mbarrier_wait(ring.empty + slot, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, (BM + self.bn) * SLOT_BYTES)
                cute.copy(tma_x, from_x[None, step], to_x[None, slot], tma_bar_ptr=ring.full + slot)
                copy_halves(tma_w, from_w, to_w, step, slot, ring.full + slot)
                slot, phase = advance(slot, phase, self.slots)
                if const_expr(self.blocks):
                    cute.arch.mbarrier_wait(of_x.empty + place, turn ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(of_x.full + place, 4 * BM)
                    cute.copy(tma_s, from_s[None, step], to_s[None, place], tma_bar_ptr=of_x.full + place)
                    place, turn = advance(place, turn, self.of_slots)
            tile += ctas

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        products: cute.Tensor,
        sx: cute.Tensor,
        sw: cute.Tensor,
        ring: Slots,
        sums: Slots,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Multiply the slots, by one warp; tcgen05 tells when a slot has been read, and when a product is done."""
        tile, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        fragments_x, fragments_w = mma.make_fragment_A(sx), mma.make_fragment_B(sw)
        count = self.tiles(out)
        slot, phase, stage, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        while tile < count:
            if const_expr(not self.blocks):
                cute.arch.mbarrier_wait(sums.empty + stage, turn ^ 1)
                mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in range(steps):
                if const_expr(self.blocks):
                    cute.arch.mbarrier_wait(sums.empty + stage, turn ^ 1)
                    mma.set(tcgen05.Field.ACCUMULATE, False)
                into = products[None, None, None, stage]
                cute.arch.mbarrier_wait(ring.full + slot, phase)
                for part in cutlass.range_constexpr(4):
                    multiply_part(mma, into, fragments_x, fragments_w, part, slot)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(ring.empty + slot)
                slot, phase = advance(slot, phase, self.slots)
                if const_expr(self.blocks):
                    with cute.arch.elect_one():
                        tcgen05.commit(sums.full + stage)
                    stage, turn = advance(stage, turn, self.stages)
            if const_expr(not self.blocks):
                with cute.arch.elect_one():
                    tcgen05.commit(sums.full + stage)
                stage, turn = advance(stage, turn, self.stages)
            tile += ctas
