"""Product of block-scaled codes in CuTe DSL for data-centre Blackwell: persistent CTAs, TMA, tcgen05 with block scales, sums in tensor memory.

A CTA takes every `ctas`-th tile of 128 rows of x by BN rows of W. Warps 0 to 3 write tiles of y, warp 4 multiplies, warp 5 loads a ring of slots by
TMA: codes, 128 bytes of a row each, and their scales. The multiplying warp copies the scales of a slot to tensor memory, into every quarter of its
lanes (tcgen05.cp 32x128b.warpx4), where tcgen05.mma reads them. Both run in one pipeline, in the order in which they were issued.

Tensor memory has 512 columns. The sums of two tiles have BN each, scales the last ones: with BN = 256 both tiles' sums share as many columns as
scales need. Those are read first, from the end of one tile and from the beginning of the next, and then the other tile may be computed.

A lane of tensor memory is a row of y: each thread of the first four warps finishes and writes one. Under silu_mul a tile of W is half gate and half
up; scales are stored by tiles of 128 rows (`shapes.py`), so that both halves have to begin at one.

The roles of the warps, and sums that share columns, are those of CUTLASS (Thakkar et al., 2023).

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import (
    Float32,
    Int32,
    Uint8,
    const_expr,
    cute,
)
from cutlass.cute.nvgpu import (
    make_tiled_tma_atom_A,
    tcgen05,
)
from cutlass.cute.runtime import make_fake_tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import (
    Slots,
    advance,
    placeholder,
)
from gristmill.kernels.cutedsl._sm100 import BM, free_tensor_memory
from gristmill.kernels.cutedsl.devices import TENSOR_COLUMNS
from gristmill.kernels.linear.block_scaled_cutedsl._main_loop_sm100 import LOADER, MULTIPLIER, MainLoop
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS, ROWS, TILE_BYTES, room


def product(config: Config) -> Source:
    """A program of (codes of x uint8 [M, bytes of K], their scales uint8 [row tiles, column tiles, 512], codes and scales of W alike, factor of x
    float32 [1], factors of W float32 [N], bias [N], residual [M, columns], out [M, columns], ctas). What the configuration does without is not read.
    """
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    m, n, columns = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(divisibility=8)

    def codes(rows, align):
        return placeholder(Uint8, rows, cute.sym_int32(divisibility=align), align=align)

    def scales():
        shape = (cute.sym_int32(), cute.sym_int32(), TILE_BYTES)
        return make_fake_tensor(
            Uint8, shape, stride=(cute.sym_int64(divisibility=TILE_BYTES), TILE_BYTES, 1), assumed_align=16
        )

    arguments = (
        codes(m, 16),
        scales(),
        codes(n, 32 if FORMS[str(config["scheme"])].mixed else 16),
        scales(),
        placeholder(Float32, cute.sym_int32(), align=4),
        placeholder(Float32, cute.sym_int32(), align=4),
        placeholder(dtype, cute.sym_int32(), align=2),
        placeholder(dtype, m, columns, align=16),
        placeholder(dtype, m, columns, align=16),
        Int32(1),
    )
    return Source(Product(dtype, config), arguments)


class Product(MainLoop):
    """The program of one configuration."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scales: cute.Tensor,
        w: cute.Tensor,
        w_scales: cute.Tensor,
        factor: cute.Tensor,
        factors: cute.Tensor,
        bias: cute.Tensor,
        residual: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        """Describe tiles, rings and TMA descriptors, and launch `ctas` CTAs."""
        mmas, rings, pieces = self.describe()
        k = cute.assume(x.shape[1] * (8 // self.of_x.width), divby=32)
        tile, (ring_x, ring_sx) = (BM, self.bn, self.bk), rings[:2]
        codes, scales = self.codes(x, self.of_x, k), self.scales(x_scales, x.shape[0], k)
        loads = (
            self.by_tma(make_tiled_tma_atom_A, codes, ring_x, tile, mmas[0]),
            self.by_tma(make_tiled_tma_atom_A, scales, ring_sx, tile, mmas[0], cutlass.Int16),
            *self.loads_of_w(mmas, pieces, w, w_scales, w.shape[0], k),
        )
        self.kernel(
            mmas,
            loads,
            rings,
            pieces,
            (factor, factors, bias, residual),
            out,
            (k + self.bk - 1) // self.bk,
        ).launch(grid=(ctas, 1, 1), block=(32 * (LOADER + 1), 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        mmas: tuple[cute.TiledMma, ...],
        loads: tuple[tuple[cute.CopyAtom, cute.Tensor], ...],
        rings: tuple[cute.ComposedLayout, cute.Layout, cute.ComposedLayout, cute.Layout],
        pieces: tuple[cute.ComposedLayout, cute.Layout],
        ending: tuple[cute.Tensor, ...],
        out: cute.Tensor,
        steps: Int32,
    ):
        """The tiles of a CTA, rows of x fastest, so that CTAs that run at the same time share W."""
        mma = mmas[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring, sums, tensor_memory, shared, shared_scales = self.allocate(rings)
        pointer = self.begin(warp, loads, ring, sums, tensor_memory, 1)
        tiles = self.sums(mma, pointer)

        if warp < MULTIPLIER:
            self.write(tiles, sums, *ending, out)
        elif warp == MULTIPLIER:
            self.multiply(mma, tiles, pointer, shared, shared_scales, rings, ring, sums, out, steps)
        elif warp == LOADER:
            slots_w = self.in_pieces(shared[1], shared_scales[1], pieces)
            self.load(mmas, loads, (shared[0], shared_scales[0]), slots_w, ring, out, steps)
        free_tensor_memory(warp, pointer, TENSOR_COLUMNS)

    @cute.jit
    def load(
        self,
        mmas: tuple[cute.TiledMma, ...],
        loads: tuple[tuple[cute.CopyAtom, cute.Tensor], ...],
        slots_x: tuple[cute.Tensor, ...],
        slots_w: tuple[cute.Tensor, ...],
        ring: Slots,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Fill slots with codes and scales by TMA."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        high, wide = self.grid(out)
        tile, slot, phase = Int32(cta), Int32(0), Int32(0)
        count = const_expr(self.bn // self.piece)
        size = const_expr((BM + ROWS * count) * self.bk // self.group)
        size = const_expr(size + (BM * self.of_x.width + self.bn * self.of_w.width) * self.bk // 8)
        of_x, of_w, of_scales = (mma.get_slice(0) for mma in mmas)
        while tile < high * wide:
            copies = []
            for one in cutlass.range_constexpr(2):
                rows = cute.local_tile(loads[one][1], (BM, self.bk), (tile % high, None))
                pair = self.partition(loads[one], slots_x[one], of_x.partition_A(rows))
                copies.append((loads[one][0], 1, 0, *pair))
            for part in cutlass.range_constexpr(count):
                n0 = tile // high * self.columns
                if const_expr(part == 1):
                    n0 += out.shape[1] if const_expr(self.gated) else self.piece
                codes = cute.local_tile(loads[2][1], (self.piece, self.bk), (n0 // self.piece, None))
                pair = self.partition(loads[2], slots_w[0], of_w.partition_B(codes))
                copies.append((loads[2][0], count, part, *pair))
                scales = cute.local_tile(loads[3][1], (ROWS, self.bk), (n0 // ROWS, None))
                pair = self.partition(loads[3], slots_w[1], of_scales.partition_B(scales))
                copies.append((loads[3][0], count, part, *pair))
            for step in range(steps):
                cute.arch.mbarrier_wait(ring.empty + slot, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, size)
                for atom, per_slot, part, to, source in copies:
                    cute.copy(
                        atom,
                        source[None, step],
                        to[None, per_slot * slot + part],
                        tma_bar_ptr=ring.full + slot,
                    )
                slot, phase = advance(slot, phase, self.slots)
            tile += ctas

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        tiles: cute.Tensor,
        pointer: cute.Pointer,
        codes: tuple[cute.Tensor, ...],
        shared_scales: tuple[cute.Tensor, ...],
        rings: tuple[cute.ComposedLayout, cute.Layout, cute.ComposedLayout, cute.Layout],
        ring: Slots,
        sums: Slots,
        out: cute.Tensor,
        steps: Int32,
    ):
        """Multiply the slots, by one warp, which tells when a slot has been read, and when a tile is done."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        high, wide = self.grid(out)
        fragments = mma.make_fragment_A(codes[0]), mma.make_fragment_B(codes[1])
        scales, copies = self.scales_of(mma, pointer, shared_scales, rings)
        tile, slot, phase, stage, turn = Int32(cta), Int32(0), Int32(0), Int32(0), Int32(0)
        while tile < high * wide:
            barrier, parity = room(stage, turn, self.memory.shared)
            cute.arch.mbarrier_wait(sums.empty + barrier, parity)
            into, right = tiles[None, None, None, stage], self.half(scales[1], tile // high)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            slot, phase = self.multiply_tile(
                mma, into, fragments, (scales[0], right), copies, ring, slot, phase, steps
            )
            self.tell(sums.full + stage)
            stage, turn = advance(stage, turn, 2)
            tile += ctas
