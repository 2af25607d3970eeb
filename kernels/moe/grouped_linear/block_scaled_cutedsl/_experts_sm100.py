"""Products of experts over block-scaled codes in CuTe DSL for data-centre Blackwell: the tiles of `_cutedsl_tiles.py`, by the main loop of
linear_block_scaled_cutedsl_sm100 (`_main_loop_sm100.py`).

A CTA takes every `ctas`-th tile of 128 rows of one expert by BN rows of its W. How many tiles there are follows from the offsets of the experts,
which are on the device. Warps 0 to 3 write tiles of y, warp 4 multiplies, warp 5 loads W and its scales by TMA, and warps 8 to 11 gather rows of x
by cp.async: codes in pieces of 16 bytes, to where TMA would swizzle them, and the 4 bytes of scales that a row has in a tile of scales.

W is loaded as one matrix of the rows of all experts, its tiles of scales as one column of tiles. Past an expert's rows of x its last one is read
again, past its rows of W those of the next expert; such sums are not stored. Past K, W and its scales are 0, and x's last columns are read again.

The roles of the warps are those of CUTLASS (Thakkar et al., 2023).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, const_expr, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import (
    Slots,
    advance,
    placeholder,
)
from gristmill.kernels.cutedsl._sm100 import BM, free_tensor_memory, part_reader
from gristmill.kernels.cutedsl.devices import TENSOR_COLUMNS
from gristmill.kernels.linear.block_scaled_cutedsl._main_loop_sm100 import LOADER, MULTIPLIER, MainLoop
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS, GROUPS, PART, ROWS, TILE_BYTES, room
from gristmill.kernels.moe.grouped_linear._cutedsl_tiles import Program, find, place

GATHERERS, WARPS = 8, 12
"""The first of the warps that gather rows of x, and how many warps there are."""
THREADS = 128
"""Those that gather, one for each row of scales of a tile; eight copy the 128 bytes of a row of codes."""


def experts_product(config: Config) -> Source:
    """A program of (codes of x uint8 [rows, bytes of K], their scales in tiles int32 [row tiles * column tiles, 128], codes of W uint8 [E * N, bytes
    of K], their scales uint8 [E * row tiles, column tiles, 512], factors of x float32 [rows], factors of W float32 [E * N], bias [E * N], offsets
    [E + 1], permutation [P], out [P, columns], top_k, ctas, alpha, limit). What the configuration does without is not read. Rows past those of the
    last expert are zeroed.
    """
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    rows, sizes = cute.sym_int32(), [cute.sym_int32() for _ in range(7)]
    mixed = FORMS[str(config["scheme"])].mixed
    tiles = (cute.sym_int32(), cute.sym_int32(), TILE_BYTES)
    strides = (cute.sym_int64(divisibility=TILE_BYTES), TILE_BYTES, 1)
    arguments = (
        placeholder(Uint8, rows, cute.sym_int32(divisibility=16), align=16),
        placeholder(Int32, cute.sym_int32(), cute.sym_int32(), align=4),
        placeholder(Uint8, sizes[0], cute.sym_int32(divisibility=32 if mixed else 16), align=16),
        make_fake_tensor(Uint8, tiles, stride=strides, assumed_align=16),
        placeholder(Float32, sizes[1], align=4),
        placeholder(Float32, sizes[2], align=4),
        placeholder(dtype, sizes[3], align=2),
        placeholder(Int32, sizes[4], align=4),
        placeholder(Int32, sizes[5], align=4),
        placeholder(dtype, sizes[6], cute.sym_int32(divisibility=8), align=16),
        *(Int32(1), Int32(1), Float32(1), Float32(1)),
    )
    return Source(ExpertsProduct(dtype, config), arguments)


class ExpertsProduct(MainLoop, Program):
    """The program of one configuration.

    Attributes:
        permuted: whether a permutation says which row of x a row of y has; else its own.
        across: tiles of scales of a slot along K.
    """

    gathered = True

    def __init__(self, dtype, config: Config):
        MainLoop.__init__(self, dtype, config)
        self.permuted = bool(config["gather"])
        self.across = self.bk // self.group // GROUPS

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scales: cute.Tensor,
        w: cute.Tensor,
        w_scales: cute.Tensor,
        x_factors: cute.Tensor,
        factors: cute.Tensor,
        bias: cute.Tensor,
        offsets: cute.Tensor,
        permutation: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
        ctas: Int32,
        alpha: Float32,
        limit: Float32,
        stream,
    ):
        """Describe tiles, rings and TMA descriptors, and launch `ctas` CTAs."""
        mmas, rings, pieces = self.describe()
        k = cute.assume(x.shape[1] * (8 // self.of_x.width), divby=32)
        self.kernel(
            mmas,
            self.loads_of_w(mmas, pieces, w, w_scales, w_scales.shape[0] * ROWS, k),
            rings,
            pieces,
            (x, x_scales, x_factors, permutation, top_k),
            offsets,
            (factors, bias, alpha, limit),
            out,
            (k + self.bk - 1) // self.bk,
        ).launch(grid=(ctas, 1, 1), block=(32 * WARPS, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        mmas: tuple[cute.TiledMma, ...],
        loads: tuple[tuple[cute.CopyAtom, cute.Tensor], ...],
        rings: tuple[cute.ComposedLayout, cute.Layout, cute.ComposedLayout, cute.Layout],
        pieces: tuple[cute.ComposedLayout, cute.Layout],
        rows: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, Int32],
        offsets: cute.Tensor,
        ending: tuple[cute.Tensor, cute.Tensor, Float32, Float32],
        out: cute.Tensor,
        steps: Int32,
    ):
        """The tiles of a CTA; then its share of the rows past those of the last expert, which are zero."""
        (x, x_scales, x_factors, permutation, top_k), mma = rows, mmas[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring, sums, tensor_memory, codes, scales = self.allocate(rings)
        # One arrival for the bytes of TMA, and one of each thread whose cp.async have landed.
        pointer = self.begin(warp, loads, ring, sums, tensor_memory, 1 + THREADS)
        tiles = self.sums(mma, pointer)

        if warp < MULTIPLIER:
            self.write_experts(tiles, sums, x_factors, permutation, top_k, offsets, *ending, out)
            self.clear(offsets, out, cute.arch.thread_idx()[0], 128)
        elif warp == MULTIPLIER:
            self.multiply_experts(mma, tiles, pointer, codes, scales, rings, ring, sums, offsets, out, steps)
        elif warp == LOADER:
            slots_w = self.in_pieces(codes[1], scales[1], pieces)
            self.load_weights(mmas, loads, slots_w, ring, offsets, out, steps)
        elif warp >= GATHERERS:
            self.gather(codes[0], scales[0], ring, x, x_scales, permutation, top_k, offsets, out, steps)
        free_tensor_memory(warp, pointer, TENSOR_COLUMNS)

    def tiles_of(self, out: cute.Tensor):
        """The first tile of this CTA, the distance to its next one, and tiles across y."""
        wide = (out.shape[1] + self.columns - 1) // self.columns
        return cute.arch.block_idx()[0], cute.arch.grid_dim()[0], wide

    def rows_of_w(self, out: cute.Tensor):
        """Rows of an expert's W."""
        return out.shape[1] * 2 if self.gated else out.shape[1]

    @cute.jit
    def load_weights(
        self,
        mmas: tuple[cute.TiledMma, ...],
        loads: tuple[tuple[cute.CopyAtom, cute.Tensor], ...],
        slots_w: tuple[cute.Tensor, ...],
        ring: Slots,
        offsets: cute.Tensor,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Fill slots with codes and scales of W by TMA."""
        tile, ctas, wide = self.tiles_of(out)
        rows = self.rows_of_w(out)
        count = const_expr(self.bn // self.piece)
        size = const_expr(ROWS * count * self.bk // self.group + self.bn * self.of_w.width * self.bk // 8)
        of_w, of_scales = mmas[1].get_slice(0), mmas[2].get_slice(0)
        slot, phase = Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            _, _, n0 = place(offsets, expert, BM, self.columns, tile - start)
            copies = []
            for part in cutlass.range_constexpr(count):
                n = n0
                if const_expr(part == 1):
                    n += out.shape[1] if const_expr(self.gated) else self.piece
                row = (expert * rows + n, 0)
                codes = cute.local_tile(
                    cute.domain_offset(row, loads[0][1]), (self.piece, self.bk), (0, None)
                )
                pair = self.partition(loads[0], slots_w[0], of_w.partition_B(codes))
                copies.append((loads[0][0], part, *pair))
                high = expert * ((rows + ROWS - 1) // ROWS) + n // ROWS
                scales = cute.local_tile(loads[1][1], (ROWS, self.bk), (high, None))
                pair = self.partition(loads[1], slots_w[1], of_scales.partition_B(scales))
                copies.append((loads[1][0], part, *pair))
            for step in range(steps):
                cute.arch.mbarrier_wait(ring.empty + slot, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, size)
                for atom, part, to, source in copies:
                    cute.copy(
                        atom, source[None, step], to[None, count * slot + part], tma_bar_ptr=ring.full + slot
                    )
                slot, phase = advance(slot, phase, self.slots)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def source_of(self, row: Int32, permutation: cute.Tensor, top_k: Int32):
        """The row of x of a row of y."""
        return permutation[row] // top_k if const_expr(self.permuted) else row

    @cute.jit
    def gather(
        self,
        sx: cute.Tensor,
        sx_scales: cute.Tensor,
        ring: Slots,
        x: cute.Tensor,
        x_scales: cute.Tensor,
        permutation: cute.Tensor,
        top_k: Int32,
        offsets: cute.Tensor,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Fill slots with rows of x and their scales by cp.async."""
        thread = cute.arch.thread_idx()[0] - 32 * GATHERERS
        tile, ctas, wide = self.tiles_of(out)
        piece = cute.make_copy_atom(cpasync.CopyG2SOp(), Uint8, num_bits_per_copy=128)
        word = cute.make_copy_atom(cpasync.CopyG2SOp(), Int32, num_bits_per_copy=32)
        copy = cute.make_tiled_copy_tv(
            piece, cute.make_layout((16, 8), stride=(8, 1)), cute.make_layout((1, 16))
        )
        # A slot is rows of 128 bytes, one after another, swizzled as TMA would; to another type a pointer is cast without its swizzle.
        bytes_of_x = cute.make_tensor(
            cute.recast_ptr(sx.iterator, swizzle_=cute.make_swizzle(3, 4, 3), dtype=Uint8),
            cute.make_layout((BM, 128, self.slots), stride=(128, 1, BM * 128)),
        )
        to = copy.get_slice(thread).partition_D(bytes_of_x)
        # Row r of a tile of scales has word r // 32 of line r % 32.
        words = cute.recast_ptr(sx_scales.iterator, dtype=Int32) + thread % 32 * 4 + thread // 32
        across = (x.shape[1] * (8 // self.of_x.width) // self.group + GROUPS - 1) // GROUPS
        slot, phase = Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, end, _ = place(offsets, expert, BM, self.columns, tile - start)
            own = self.source_of(cutlass.min(row0 + thread, end - 1), permutation, top_k)
            row_tile, line = own >> 7, (own & 31) * 4 + (own >> 5 & 3)  # of its scales
            sources = cute.make_rmem_tensor((BM // 16,), Int32)
            for i in cutlass.range_constexpr(BM // 16):
                # Past the expert's rows its last one is read again; those sums are not stored.
                row = cutlass.min(row0 + thread // 8 + 16 * i, end - 1)
                sources[i] = self.source_of(row, permutation, top_k)
            for step in range(steps):
                cute.arch.mbarrier_wait(ring.empty + slot, phase ^ 1)
                at = cutlass.min(step * 128 + thread % 8 * 16, x.shape[1] - 16)
                for i in cutlass.range_constexpr(BM // 16):
                    source = part_of_row(x, sources[i], at, 16)
                    cute.copy(copy, source, to[(None, 0), i, 0, slot])
                for part in cutlass.range_constexpr(self.across):
                    column_tile = cutlass.min(step * self.across + part, across - 1)
                    held = cute.make_tensor(words + (slot * self.across + part) * ROWS, cute.make_layout(1))
                    cute.copy(word, part_of_row(x_scales, row_tile * across + column_tile, line, 1), held)
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + slot)
                slot, phase = advance(slot, phase, self.slots)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def multiply_experts(
        self,
        mma: cute.TiledMma,
        tiles: cute.Tensor,
        pointer: cute.Pointer,
        codes: tuple[cute.Tensor, ...],
        shared_scales: tuple[cute.Tensor, ...],
        rings: tuple[cute.ComposedLayout, cute.Layout, cute.ComposedLayout, cute.Layout],
        ring: Slots,
        sums: Slots,
        offsets: cute.Tensor,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Multiply the slots, by one warp, which tells when a slot has been read, and when a tile is done."""
        tile, ctas, wide = self.tiles_of(out)
        fragments = mma.make_fragment_A(codes[0]), mma.make_fragment_B(codes[1])
        scales, copies = self.scales_of(mma, pointer, shared_scales, rings)
        slot, phase, stage, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            _, _, n0 = place(offsets, expert, BM, self.columns, tile - start)
            barrier, parity = room(stage, turn, self.memory.shared)
            cute.arch.mbarrier_wait(sums.empty + barrier, parity)
            into = tiles[None, None, None, stage]
            of_tile = scales[0], self.half(scales[1], n0 // self.piece)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            slot, phase = self.multiply_tile(mma, into, fragments, of_tile, copies, ring, slot, phase, steps)
            self.tell(sums.full + stage)
            stage, turn = advance(stage, turn, 2)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)

    @cute.jit
    def write_experts(
        self,
        tiles: cute.Tensor,
        sums: Slots,
        x_factors: cute.Tensor,
        permutation: cute.Tensor,
        top_k: Int32,
        offsets: cute.Tensor,
        factors: cute.Tensor,
        bias: cute.Tensor,
        alpha: Float32,
        limit: Float32,
        out: cute.Tensor,
    ):
        """Finish and write tiles of y, a row each of 128 threads."""
        thread, _, _ = cute.arch.thread_idx()
        tile, ctas, wide = self.tiles_of(out)
        rows = self.rows_of_w(out)
        read, sources, shape = part_reader(tiles, PART, thread)
        stage, turn = Int32(0), Int32(0)
        expert, start, first, before = find(offsets, BM, wide, tile, Int32(0), Int32(0))
        while expert < offsets.shape[0] - 1:
            row0, end, n0 = place(offsets, expert, BM, self.columns, tile - start)
            row, of_x = row0 + thread, Float32(1)
            if const_expr(self.factored):
                of_x = x_factors[self.source_of(cutlass.min(row, end - 1), permutation, top_k)]
            cute.arch.mbarrier_wait(sums.full + stage, turn)
            at, own = (row, end, n0, expert * rows), (of_x, alpha, limit)
            self.write_tile(read, sources, shape, sums, stage, at, own, (factors, bias, out), out)
            stage, turn = advance(stage, turn, 2)
            tile += ctas
            expert, start, first, before = find(offsets, BM, wide, tile, first, before)


def part_of_row(tensor: cute.Tensor, row: Int32, column: Int32, count: int):
    """`count` numbers of a row, which begin at a multiple of as many."""
    at = cute.assume(Int64(row) * tensor.layout.stride[0] + column, divby=count)
    return cute.make_tensor(tensor.iterator + at, cute.make_layout(count))
