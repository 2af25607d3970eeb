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
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers, blockscaled_layout

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source
from gristmill.kernels.cutedsl._pieces import (
    Slots,
    advance,
    allocate,
    initialize,
    placeholder,
    shared_tensor,
)
from gristmill.kernels.cutedsl._sm100 import BM, CLUSTER, free_tensor_memory, slots_by_tma
from gristmill.kernels.cutedsl.devices import TENSOR_COLUMNS
from gristmill.kernels.linear.block_scaled_cutedsl._finish_sm100 import Finish
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS, ROWS, TILE_BYTES, room

MULTIPLIER, LOADER = 4, 5
"""The warps that multiply and load."""


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


class Product(Finish):
    """The program of one configuration.

    Attributes:
        piece: rows of W that TMA loads at a time.
    """

    def __init__(self, dtype, config: Config):
        super().__init__(dtype, config)
        self.piece = min(self.bn, ROWS)

    def mma(self, columns: int):
        """tcgen05.mma of 128 rows of x by `columns` rows of W."""
        major = OperandMajorMode.K
        return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
            self.of_x,
            self.of_w,
            major,
            major,
            self.of_scales,
            self.group,
            tcgen05.CtaGroup.ONE,
            (BM, columns),
        )

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
        # W comes in pieces of up to 128 rows, and its scales in tiles of 128: gate and up are apart. Half a tile of scales is not used with 64 rows.
        whole, piece, scaled = self.mma(self.bn), self.mma(self.piece), self.mma(ROWS)
        tile, of_piece, of_scaled = ((BM, rows, self.bk) for rows in (self.bn, self.piece, ROWS))
        many = self.bn // self.piece * self.slots
        k = cute.assume(x.shape[1] * (8 // self.of_x.width), divby=32)

        def codes(tensor, dtype):
            rows = cute.recast_ptr(tensor.iterator, dtype=dtype)
            return cute.make_tensor(rows, cute.make_layout((tensor.shape[0], k), stride=(k, 1)))

        def scales(tensor, rows):
            atom = blockscaled_layout.BlockScaledBasicChunk(self.group).layout
            layout = cute.tile_to_shape(atom, (rows, k), (2, 1))
            return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=self.of_scales), layout)

        ring_x = blackwell_helpers.make_smem_layout_a(whole, tile, self.of_x, self.slots)
        ring_w = blackwell_helpers.make_smem_layout_b(whole, tile, self.held_w, self.slots)
        pieces = blackwell_helpers.make_smem_layout_b(piece, of_piece, self.held_w, many)
        ring_sx = blockscaled_layout.make_smem_layout_sfa(whole, tile, self.group, self.slots)
        ring_sw = blockscaled_layout.make_smem_layout_sfb(whole, tile, self.group, self.slots)
        pieces_s = blockscaled_layout.make_smem_layout_sfb(scaled, of_scaled, self.group, many)

        def load(atom, rows, ring, shape, mma, held=None):
            copy, slot = (
                cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE),
                cute.slice_(ring, (None, None, None, 0)),
            )
            return atom(copy, rows, slot, shape, mma, CLUSTER, internal_type=held)

        of_x, of_w, pair = make_tiled_tma_atom_A, make_tiled_tma_atom_B, cutlass.Int16
        held_w = cutlass.Int8 if const_expr(self.form.mixed) else None
        loads = (
            load(of_x, codes(x, self.of_x), ring_x, tile, whole),
            load(of_x, scales(x_scales, x.shape[0]), ring_sx, tile, whole, pair),
            load(of_w, codes(w, self.of_w), pieces, of_piece, piece, held_w),
            load(of_w, scales(w_scales, w.shape[0]), pieces_s, of_scaled, scaled, pair),
        )
        self.kernel(
            (whole, piece, scaled),
            loads,
            (ring_x, ring_sx, ring_w, ring_sw),
            (pieces, pieces_s),
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
        memory = SmemAllocator()
        ring, sums = allocate(memory, self.slots), allocate(memory, 2)
        tensor_memory = memory.allocate_array(Int32, 1)
        sx, sw = shared_tensor(memory, self.of_x, rings[0]), shared_tensor(memory, self.held_w, rings[2])
        sx_scales = memory.allocate_tensor(self.of_scales, rings[1], byte_alignment=1024)
        sw_scales = memory.allocate_tensor(self.of_scales, rings[3], byte_alignment=1024)
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, tensor_memory)
            for one in cutlass.range_constexpr(4):
                cpasync.prefetch_descriptor(loads[one][0])
            initialize(ring, self.slots, 1, 1)
            initialize(sums, 2, 1, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_memory)
        shape = cute.append(mma.partition_shape_C((BM, self.bn)), 2)
        layout = mma.make_fragment_C(shape).layout
        apart = self.memory.apart * layout.stride[0][1]
        tiles = cute.make_tensor(pointer, cute.make_layout(layout.shape, stride=(*layout.stride[:3], apart)))

        if warp < MULTIPLIER:
            self.write(tiles, sums, *ending, out)
        elif warp == MULTIPLIER:
            self.multiply(
                mma, tiles, pointer, (sx, sw), (sx_scales, sw_scales), rings, ring, sums, out, steps
            )
        elif warp == LOADER:
            slots_w = (
                cute.make_tensor(sw.iterator, pieces[0].outer),
                cute.make_tensor(sw_scales.iterator, pieces[1]),
            )
            self.load(mmas, loads, (sx, sx_scales), slots_w, ring, out, steps)
        free_tensor_memory(warp, pointer, TENSOR_COLUMNS)

    @cute.jit
    def partition(self, load: tuple[cute.CopyAtom, cute.Tensor], ring: cute.Tensor, tiles: cute.Tensor):
        """Where TMA puts and finds slots, of rows as an MMA partitions them; a scale counts once."""
        to, source = slots_by_tma(load[0], ring, tiles)
        return cute.filter_zeros(to), cute.filter_zeros(source)

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

    def to_tensor_memory(self, shared: cute.Tensor, scales: cute.Tensor):
        """The copy of a slot's scales to tensor memory, from and to."""
        source, to = cute.filter_zeros(shared), cute.filter_zeros(scales)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), self.of_scales)
        copy = tcgen05.make_s2t_copy(atom, to)
        own = copy.get_slice(0)
        return copy, tcgen05.get_s2t_smem_desc_tensor(copy, own.partition_S(source)), own.partition_D(to)

    def scales_at(self, pointer: cute.Pointer, layout: cute.Layout):
        """Scales in tensor memory."""
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=self.of_scales), layout)

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
        shape, one = (BM, self.bn, self.bk), (None, None, None, 0)
        fragments_x, fragments_w = mma.make_fragment_A(codes[0]), mma.make_fragment_B(codes[1])
        layout_x = blockscaled_layout.make_tmem_layout_sfa(mma, shape, self.group, cute.slice_(rings[1], one))
        layout_w = blockscaled_layout.make_tmem_layout_sfb(mma, shape, self.group, cute.slice_(rings[3], one))
        x_scales = self.scales_at(pointer + self.memory.of_x, layout_x)
        all_scales = self.scales_at(pointer + self.memory.of_w, layout_w)
        copy_x, from_x, to_x = self.to_tensor_memory(shared_scales[0], x_scales)
        copy_w, from_w, to_w = self.to_tensor_memory(shared_scales[1], all_scales)
        tile, slot, phase, stage, turn = Int32(cta), Int32(0), Int32(0), Int32(0), Int32(0)
        while tile < high * wide:
            barrier, parity = room(stage, turn, self.memory.shared)
            cute.arch.mbarrier_wait(sums.empty + barrier, parity)
            # Of 64 rows, every other tile has the second half of a tile of scales, 2 of its columns.
            aside = tile // high % 2 * 2 if const_expr(self.bn < ROWS) else 0
            w_scales = self.scales_at(pointer + self.memory.of_w + aside, layout_w)
            into = tiles[None, None, None, stage]
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in range(steps):
                cute.arch.mbarrier_wait(ring.full + slot, phase)
                cute.copy(copy_x, from_x[None, None, None, None, slot], to_x)
                cute.copy(copy_w, from_w[None, None, None, None, slot], to_w)
                for part in cutlass.range_constexpr(cute.size(fragments_x, mode=[2])):
                    left = [fragments_x[None, None, part, slot], x_scales[None, None, part]]
                    right = [fragments_w[None, None, part, slot], w_scales[None, None, part]]
                    cute.gemm(mma, into, left, right, into)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                self.tell(ring.empty + slot)
                slot, phase = advance(slot, phase, self.slots)
            self.tell(sums.full + stage)
            stage, turn = advance(stage, turn, 2)
            tile += ctas

    def tell(self, barrier: cute.Pointer):
        """Arrive at a barrier when what was issued before is done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)
