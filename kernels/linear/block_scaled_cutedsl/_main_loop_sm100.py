"""The main loop of block-scaled products in CuTe DSL for data-centre Blackwell: rings of codes and scales in shared memory, scales and sums in tensor
memory, the products of a tile.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import (
    Float32,
    Int32,
    const_expr,
    cute,
)
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers, blockscaled_layout

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl._pieces import (
    Slots,
    advance,
    allocate,
    initialize,
    shared_tensor,
)
from gristmill.kernels.cutedsl._sm100 import BM, CLUSTER, slots_by_tma
from gristmill.kernels.cutedsl.devices import TENSOR_COLUMNS
from gristmill.kernels.linear.block_scaled_cutedsl._finish_sm100 import Finish
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import ROWS

MULTIPLIER, LOADER = 4, 5
"""The warps that multiply and load."""


class MainLoop(Finish):
    """What the programs of a configuration have in common.

    Attributes:
        piece: rows of W that TMA loads at a time.
        gathered: whether rows of x come by cp.async and not by TMA.
    """

    gathered = False

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

    def describe(self):
        """MMAs of a tile, of a piece of W and of a tile of its scales; layouts of the rings of x and W, of codes and of scales; those of W in pieces.

        W comes in pieces of up to 128 rows, and its scales in tiles of 128: gate and up are apart. Half a tile of scales is not used with 64 rows.
        """
        whole, piece, scaled = self.mma(self.bn), self.mma(self.piece), self.mma(ROWS)
        tile, of_piece, of_scaled = ((BM, rows, self.bk) for rows in (self.bn, self.piece, ROWS))
        many = self.bn // self.piece * self.slots
        rings = (
            blackwell_helpers.make_smem_layout_a(whole, tile, self.of_x, self.slots),
            blockscaled_layout.make_smem_layout_sfa(whole, tile, self.group, self.slots),
            blackwell_helpers.make_smem_layout_b(whole, tile, self.held_w, self.slots),
            blockscaled_layout.make_smem_layout_sfb(whole, tile, self.group, self.slots),
        )
        pieces = (
            blackwell_helpers.make_smem_layout_b(piece, of_piece, self.held_w, many),
            blockscaled_layout.make_smem_layout_sfb(scaled, of_scaled, self.group, many),
        )
        return (whole, piece, scaled), rings, pieces

    def codes(self, tensor: cute.Tensor, dtype, k: Int32):
        """Bytes of codes as a matrix of K columns."""
        rows = cute.recast_ptr(tensor.iterator, dtype=dtype)
        return cute.make_tensor(rows, cute.make_layout((tensor.shape[0], k), stride=(k, 1)))

    def scales(self, tensor: cute.Tensor, rows: Int32, k: Int32):
        """Tiles of scales as a matrix of so many rows and K columns, whose columns of a group are the same."""
        atom = blockscaled_layout.BlockScaledBasicChunk(self.group).layout
        layout = cute.tile_to_shape(atom, (rows, k), (2, 1))
        return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=self.of_scales), layout)

    def by_tma(self, atom, rows: cute.Tensor, ring, shape: tuple[int, ...], mma: cute.TiledMma, held=None):
        """The TMA atom that loads `rows` into a slot of a ring, and what it copies from; held: the type of copied numbers, if another."""
        copy, slot = (
            cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE),
            cute.slice_(ring, (None, None, None, 0)),
        )
        return atom(copy, rows, slot, shape, mma, CLUSTER, internal_type=held)

    def loads_of_w(self, mmas, pieces, w: cute.Tensor, w_scales: cute.Tensor, rows: Int32, k: Int32):
        """TMA of W's codes and scales. rows: of W, of whole tiles where tiles of other weights follow."""
        codes, scales = self.codes(w, self.of_w, k), self.scales(w_scales, rows, k)
        of_piece, of_scaled = (BM, self.piece, self.bk), (BM, ROWS, self.bk)
        held = cutlass.Int8 if self.form.mixed else None
        return (
            self.by_tma(make_tiled_tma_atom_B, codes, pieces[0], of_piece, mmas[1], held),
            self.by_tma(make_tiled_tma_atom_B, scales, pieces[1], of_scaled, mmas[2], cutlass.Int16),
        )

    def allocate(self, rings):
        """Shared memory: barriers of the ring and of the sums, the address of tensor memory, codes of x and W, their scales."""
        memory = SmemAllocator()
        ring, sums = allocate(memory, self.slots), allocate(memory, 2)
        tensor_memory = memory.allocate_array(Int32, 1)
        codes = shared_tensor(memory, self.of_x, rings[0]), shared_tensor(memory, self.held_w, rings[2])
        scales = tuple(memory.allocate_tensor(self.of_scales, rings[i], byte_alignment=1024) for i in (1, 3))
        return ring, sums, tensor_memory, codes, scales

    @cute.jit
    def begin(
        self,
        warp: Int32,
        loads: tuple[tuple[cute.CopyAtom, cute.Tensor], ...],
        ring: Slots,
        sums: Slots,
        tensor_memory: cute.Pointer,
        arrivals: cutlass.Constexpr,
    ):
        """Initialize barriers, by which a slot is full after so many arrivals, and allocate tensor memory."""
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, tensor_memory)
            for one in cutlass.range_constexpr(len(loads)):
                cpasync.prefetch_descriptor(loads[one][0])
            initialize(ring, self.slots, arrivals, 1)
            initialize(sums, 2, 1, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_memory)

    def in_pieces(self, codes: cute.Tensor, scales: cute.Tensor, pieces):
        """The ring of W, as TMA fills it."""
        return cute.make_tensor(codes.iterator, pieces[0].outer), cute.make_tensor(scales.iterator, pieces[1])

    def sums(self, mma: cute.TiledMma, pointer: cute.Pointer):
        """The sums of two tiles in tensor memory."""
        layout = mma.make_fragment_C(cute.append(mma.partition_shape_C((BM, self.bn)), 2)).layout
        apart = self.memory.apart * layout.stride[0][1]
        return cute.make_tensor(pointer, cute.make_layout(layout.shape, stride=(*layout.stride[:3], apart)))

    @cute.jit
    def partition(self, load: tuple[cute.CopyAtom, cute.Tensor], ring: cute.Tensor, tiles: cute.Tensor):
        """Where TMA puts and finds slots, of rows as an MMA partitions them; a scale counts once."""
        to, source = slots_by_tma(load[0], ring, tiles)
        return cute.filter_zeros(to), cute.filter_zeros(source)

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

    def scales_of(self, mma: cute.TiledMma, pointer: cute.Pointer, shared: tuple[cute.Tensor, ...], rings):
        """Scales of x and W in tensor memory, and their copies from slots."""
        shape, one = (BM, self.bn, self.bk), (None, None, None, 0)
        layout_x = blockscaled_layout.make_tmem_layout_sfa(mma, shape, self.group, cute.slice_(rings[1], one))
        layout_w = blockscaled_layout.make_tmem_layout_sfb(mma, shape, self.group, cute.slice_(rings[3], one))
        scales = (
            self.scales_at(pointer + self.memory.of_x, layout_x),
            self.scales_at(pointer + self.memory.of_w, layout_w),
        )
        return scales, tuple(self.to_tensor_memory(shared[i], scales[i]) for i in range(2))

    def half(self, scales: cute.Tensor, piece: Int32):
        """The scales of a piece of W. Of 64 rows, every other one has the second half of a tile of scales, 2 of its columns."""
        if self.bn >= ROWS:
            return scales
        pointer = cute.recast_ptr(scales.iterator, dtype=Float32) + piece % 2 * 2
        return self.scales_at(pointer, scales.layout)

    @cute.jit
    def multiply_tile(
        self,
        mma: cute.TiledMma,
        into: cute.Tensor,
        fragments: tuple[cute.Tensor, ...],
        scales: tuple[cute.Tensor, ...],
        copies: tuple[tuple[cute.TiledCopy, cute.Tensor, cute.Tensor], ...],
        ring: Slots,
        slot: Int32,
        phase: Int32,
        steps: Int32,
    ):
        """Multiply as many slots as K has; the next slot, and its phase. The caller's loop sets `mma` before, so that CuTe DSL carries it
        through."""
        (fragments_x, fragments_w), (x_scales, w_scales) = fragments, scales
        (copy_x, from_x, to_x), (copy_w, from_w, to_w) = copies
        for _ in range(steps):
            cute.arch.mbarrier_wait(ring.full + slot, phase)
            if const_expr(self.gathered):  # tcgen05 reads by another proxy than cp.async writes by
                cute.arch.fence_proxy("async.shared", space="cta")
            cute.copy(copy_x, from_x[None, None, None, None, slot], to_x)
            cute.copy(copy_w, from_w[None, None, None, None, slot], to_w)
            for part in cutlass.range_constexpr(cute.size(fragments_x, mode=[2])):
                left = [fragments_x[None, None, part, slot], x_scales[None, None, part]]
                right = [fragments_w[None, None, part, slot], w_scales[None, None, part]]
                cute.gemm(mma, into, left, right, into)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            self.tell(ring.empty + slot)
            slot, phase = advance(slot, phase, self.slots)
        return slot, phase

    def tell(self, barrier: cute.Pointer):
        """Arrive at a barrier when what was issued before is done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)
