"""The end of tiles of products on data-centre Blackwell: scales, bias, activation and residual, from tensor memory to y by TMA.

A lane of tensor memory is a row of y: a thread finishes its row, `PART` columns at a time, and a warp stores its 32 rows by way of shared memory.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl._pieces import Slots, advance, eight, placeholder, swiglu
from gristmill.kernels.cutedsl._sm100 import BM, part_reader
from gristmill.kernels.linear.cutedsl_sm100.shapes import SCALES, SLOT_BYTES

LANES = 32
"""Lanes of tensor memory that a warp reads: of a quad of warps, each has its own."""
PART, WIDTH = 32, 64
"""Columns that a thread reads from tensor memory at a time; columns of y that a warp stores at a time at most, again 128 bytes."""


class Finish:
    """What is done with the sums of a configuration.

    Attributes:
        dtype: of y. operand: of what is multiplied.
        bn: rows of W of a tile. columns: of y, BN or half of it.
        bk: columns of a slot. slots: of the ring. stages: products that tensor memory has room for.
        quads: groups of four warps that finish a tile, each its share of the columns, `share` parts of y. width: columns of y that a warp stores at a
            time.
        gated, biased, added: whether silu(gate) · up, a bias and a residual follow.
        scales: what has one scale: `rows` of x and of W, `blocks` of 128 columns of x and 128 x 128 of W, or `none`.
        of_slots: slots of the ring of scales of x.
    """

    def __init__(self, dtype, operand, config: Config, scales: str):
        self.dtype, self.operand, self.scales = dtype, operand, scales
        names = ("bn", "slots", "stages", "quads")
        self.bn, self.slots, self.stages, self.quads = (int(config[name]) for name in names)
        flags = str(config["epilogue"]).split("+")
        self.gated, self.biased, self.added = (flag in flags for flag in ("silu_mul", "bias", "residual"))
        self.columns = self.bn // 2 if self.gated else self.bn
        self.share = self.columns // (PART * self.quads)
        self.width = min(WIDTH, self.share * PART)
        self.bk = SLOT_BYTES * 8 // operand.width
        self.blocks = scales == "blocks"
        self.of_slots = SCALES if self.blocks else 1
        self.finishers = 4 * self.quads

    def last_arguments(self, m, n, columns):
        """Placeholders of bias [N], residual [M, columns], out [M, columns] and ctas. Without a bias or a residual, out stands in."""
        out = placeholder(self.dtype, m, columns, align=16)
        bias = placeholder(self.dtype, n, align=2) if self.biased else out
        return bias, placeholder(self.dtype, m, columns, align=16) if self.added else out, out, Int32(1)

    @cute.jit
    def place(self, tile: Int32, out: cute.Tensor):
        """The first row and the first column of y of a tile. Rows come fastest, so that CTAs that run at the same time share W."""
        high = (out.shape[0] + BM - 1) // BM
        return tile % high * BM, cute.assume(tile // high * self.columns, divby=self.columns)

    @cute.jit
    def tiles(self, out: cute.Tensor):
        """How many tiles y has."""
        m, n = out.shape
        return (m + BM - 1) // BM * ((n + self.columns - 1) // self.columns)

    def part(self, i: int, quad: Int32):
        """The i-th part of the columns of W of a quad: those of the gate, then those of up."""
        return i // self.share * (self.columns // PART) + quad * self.share + i % self.share

    def first(self, i: int, quad: Int32, n0: Int32, out: cute.Tensor):
        """The row of W that the i-th part of a quad begins with."""
        up = out.shape[1] if const_expr(i >= self.share) else 0
        return n0 + up + (quad * self.share + i % self.share) * PART

    @cute.jit
    def finish(
        self,
        products: cute.Tensor,
        sums: Slots,
        of_x: Slots,
        ss: cute.Tensor,
        so: cute.Tensor,
        store: tuple[cute.CopyAtom, cute.Tensor],
        scales: tuple[cute.Tensor, ...],
        ending: tuple[cute.Tensor, ...],
        out: cute.Tensor,
        steps: Int32,
    ):
        """Finish and write tiles of y."""
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        quad, lane = warp // 4, thread % LANES
        read, sources, shape = part_reader(products, PART, thread % BM)
        staged = so[lane, None, warp]
        stage, turn, slot, phase = Int32(0), Int32(0), Int32(0), Int32(0)
        count, per = self.tiles(out), self.bn // (PART * self.quads)
        totals = [cute.make_rmem_tensor(shape, Float32) for _ in range(per if self.blocks else 1)]
        while tile < count:
            m0, n0 = self.place(tile, out)
            row0, of_row = m0 + warp % 4 * LANES, Float32(1)
            if const_expr(self.scales == "rows"):
                of_row = scales[0][cutlass.min(row0 + lane, out.shape[0] - 1), 0]
            if const_expr(self.blocks):
                stage, turn, slot, phase = self.add(
                    totals, read, sources, sums, of_x, ss, scales, n0, out, steps, stage, turn, slot, phase
                )
            else:
                cute.arch.mbarrier_wait(sums.full + stage, turn)
            for j in cutlass.range_constexpr(self.share):
                y = cute.make_rmem_tensor((PART,), Float32)
                if const_expr(self.blocks):
                    gate = totals[j]
                else:
                    gate = self.read(read, sources, shape, self.part(j, quad), stage)
                self.scale(gate, scales, ending, of_row, self.first(j, quad, n0, out))
                if const_expr(self.gated):
                    if const_expr(self.blocks):
                        up = totals[self.share + j]
                    else:
                        up = self.read(read, sources, shape, self.part(self.share + j, quad), stage)
                    self.scale(up, scales, ending, of_row, self.first(self.share + j, quad, n0, out))
                    for i in cutlass.range_constexpr(PART):
                        y[i] = swiglu(gate[i], up[i], False, Float32(1), Float32(0))
                else:
                    for i in cutlass.range_constexpr(PART):
                        y[i] = gate[i]
                if const_expr(not self.blocks and j == self.share - 1):
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(sums.empty + stage)
                    stage, turn = advance(stage, turn, self.stages)
                self.store(y, staged, so[None, None, warp], store, ending, row0, lane, quad, n0, j, out)
            tile += ctas
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # before shared memory is another CTA's

    @cute.jit
    def read(
        self, read: cute.TiledCopy, sources: cute.Tensor, shape: cutlass.Constexpr, part: Int32, stage: Int32
    ):
        """This thread's numbers of a part of a product."""
        values = cute.make_rmem_tensor(shape, Float32)
        cute.copy(read, sources[None, None, None, part, stage], values)
        cute.arch.fence_view_async_tmem_load()
        return values

    @cute.jit
    def add(
        self,
        totals: list[cute.Tensor],
        read: cute.TiledCopy,
        sources: cute.Tensor,
        sums: Slots,
        of_x: Slots,
        ss: cute.Tensor,
        scales: tuple[cute.Tensor, ...],
        n0: Int32,
        out: cute.Tensor,
        steps: Int32,
        stage: Int32,
        turn: Int32,
        slot: Int32,
        phase: Int32,
    ):
        """Add up the products of the slots of a tile, times the scales of x and W."""
        _, w_scales, row_block = scales
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        quad, lane, last = warp // 4, thread % LANES, row_block.shape[0] - 1
        # Where blocks were cut or fused, rows of W of one part have several scales, which a warp's lanes hold.
        of_lane, others = [], Int32(0)
        for i in cutlass.range_constexpr(len(totals)):
            of_lane.append(row_block[cutlass.min(self.first(i, quad, n0, out) + lane, last)])
            others |= of_lane[i] ^ cute.arch.shuffle_sync(of_lane[i], 0)
            totals[i].fill(0.0)
        is_one = cute.arch.vote_all_sync(others == 0)
        for step in range(steps):
            held = [w_scales[of_lane[i], step] for i in range(len(totals))]
            cute.arch.mbarrier_wait(of_x.full + slot, phase)
            of_row = ss[thread % BM, slot]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(of_x.empty + slot)
            slot, phase = advance(slot, phase, self.of_slots)
            cute.arch.mbarrier_wait(sums.full + stage, turn)
            for i in cutlass.range_constexpr(len(totals)):
                values = self.read(read, sources, totals[i].shape, self.part(i, quad), stage)
                if is_one:
                    factor = of_row * held[i]
                    for c in cutlass.range_constexpr(0, PART, 2):
                        totals[i][c], totals[i][c + 1] = cute.arch.fma_packed_f32x2(
                            (values[c], values[c + 1]), (factor, factor), (totals[i][c], totals[i][c + 1])
                        )
                else:
                    for c in cutlass.range_constexpr(PART):
                        totals[i][c] += values[c] * (of_row * cute.arch.shuffle_sync(held[i], c))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums.empty + stage)
            stage, turn = advance(stage, turn, self.stages)
        return stage, turn, slot, phase

    @cute.jit
    def scale(
        self,
        values: cute.Tensor,
        scales: tuple[cute.Tensor, ...],
        ending: tuple[cute.Tensor, ...],
        of_row: Float32,
        n: Int32,
    ):
        """Multiply a part, from row n of W on, by scales of rows, and add the bias. A lane holds what belongs to its column."""
        lane = cute.arch.lane_idx()
        if const_expr(self.scales == "rows"):
            w_scales = scales[1]
            held = w_scales[cutlass.min(n + lane, w_scales.shape[0] - 1), 0]
            for i in cutlass.range_constexpr(PART):
                values[i] *= of_row * cute.arch.shuffle_sync(held, i)
        if const_expr(self.biased):
            bias = ending[0]
            added = bias[cutlass.min(n + lane, bias.shape[0] - 1)].to(Float32)
            for i in cutlass.range_constexpr(PART):
                values[i] += cute.arch.shuffle_sync(added, i)

    @cute.jit
    def store(
        self,
        y: cute.Tensor,
        staged: cute.Tensor,
        of_warp: cute.Tensor,
        store: tuple[cute.CopyAtom, cute.Tensor],
        ending: tuple[cute.Tensor, ...],
        row0: Int32,
        lane: Int32,
        quad: Int32,
        n0: Int32,
        j: cutlass.Constexpr,
        out: cute.Tensor,
    ):
        """Add the residual to part j of y, round it, and store `width` columns when they are complete; TMA leaves out what is past the end."""
        row, n = row0 + lane, n0 + (quad * self.share + j) * PART
        at = j * PART % self.width
        if const_expr(self.added):
            residual = ending[-1]
            for c in cutlass.range_constexpr(PART // 8):
                if row < out.shape[0] and n + 8 * c < out.shape[1]:
                    added = cute.make_rmem_tensor((8,), self.dtype)
                    cute.autovec_copy(eight(residual, row, n + 8 * c), added)
                    for i in cutlass.range_constexpr(8):
                        y[8 * c + i] += added[i].to(Float32)
        if const_expr(at == 0):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was here has been stored
            cute.arch.sync_warp()
        rounded = cute.make_rmem_tensor((PART,), self.dtype)
        rounded.store(y.load().to(self.dtype))
        for c in cutlass.range_constexpr(PART // 8):
            cute.autovec_copy(
                cute.local_tile(rounded, (8,), (c,)), cute.local_tile(staged, (8,), (at // 8 + c,))
            )
        if const_expr(at + PART == self.width):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            atom, memory = store
            to = cute.local_tile(
                cute.domain_offset((row0, n + PART - self.width), memory), (LANES, self.width), (0, 0)
            )
            here, there = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(of_warp, 0, 2), cute.group_modes(to, 0, 2)
            )
            cute.copy(atom, here, there)
            cute.arch.cp_async_bulk_commit_group()
