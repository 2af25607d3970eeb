"""What programs of CuTe DSL for data-centre Blackwell have in common: tcgen05, rings of its operands in shared memory, and TMA into their slots.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.utils import blackwell_helpers

BM = 128
"""Rows of x of a tile, the lanes of tensor memory."""
CLUSTER = (1, 1, 1, 1)


def tcgen05_mma(dtype, columns: int):
    """tcgen05.mma of one CTA on two operands in shared memory whose rows are contiguous along K: 128 rows of x by `columns` of W."""
    major, one = OperandMajorMode.K, tcgen05.CtaGroup.ONE
    return blackwell_helpers.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, one, (BM, columns))


class Operands:
    """Rings of `slots` slots of 128 rows of x and `bn` rows of W, of `bk` columns each.

    W comes in halves, which may lie apart, as gate and up do: its ring is one of BN rows, or of twice as many slots of BN / 2 rows.

    Attributes:
        mma, half: the product of a slot, and that of half the rows of W.
        x, w, halves: layouts of the rings, the last in halves.
    """

    def __init__(self, dtype, bn: int, bk: int, slots: int):
        self.tile, self.tile_of_half = (BM, bn, bk), (BM, bn // 2, bk)
        self.mma, self.half = tcgen05_mma(dtype, bn), tcgen05_mma(dtype, bn // 2)
        self.x = blackwell_helpers.make_smem_layout_a(self.mma, self.tile, dtype, slots)
        self.w = blackwell_helpers.make_smem_layout_b(self.mma, self.tile, dtype, slots)
        self.halves = blackwell_helpers.make_smem_layout_b(self.half, self.tile_of_half, dtype, 2 * slots)

    def load_x(self, x: cute.Tensor):
        """The TMA atom that loads 128 rows of x into a slot, and what it copies from."""
        load, slot = (
            cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE),
            cute.select(self.x, mode=[0, 1, 2]),
        )
        return make_tiled_tma_atom_A(load, x, slot, self.tile, self.mma, CLUSTER)

    def load_w(self, w: cute.Tensor):
        """The TMA atom that loads BN / 2 rows of W, and what it copies from."""
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        slot = cute.select(self.halves, mode=[0, 1, 2])
        return make_tiled_tma_atom_B(load, w, slot, self.tile_of_half, self.half, CLUSTER)


def part_reader(products: cute.Tensor, columns: int, thread: Int32):
    """The copy of `columns` columns of row `thread` of a product from tensor memory to registers, what it copies from by part and product, and the
    shape of what it gives."""
    parts = cute.flat_divide(products[(None, None), 0, 0, None], (BM, columns, 1))
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), Float32)
    read = tcgen05.make_tmem_copy(atom, parts[None, None, 0, 0, 0, 0])
    own = read.get_slice(thread)
    shape = own.partition_D(cute.make_identity_tensor((BM, columns))).shape
    return read, own.partition_S(parts)[None, None, None, 0, 0, None, None], shape


@cute.jit
def free_tensor_memory(warp: Int32, pointer: cute.Pointer, columns: cutlass.Constexpr):
    """Free what warp 0 has allocated, when all threads are done."""
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, columns)


def slots_by_tma(atom: cute.CopyAtom, ring: cute.Tensor, rows: cute.Tensor):
    """What `cute.copy` takes to copy a step of `rows`, as an MMA partitions them, into a slot of a ring: the slots, then the steps."""
    ring, rows = cute.group_modes(ring, 0, 3), cute.group_modes(rows, 0, 3)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), ring, rows)


def multiply_part(
    mma: cute.TiledMma, into: cute.Tensor, x: cute.Tensor, w: cute.Tensor, part: int, slot: Int32
):
    """Multiply the fragments of a slot that one instruction takes. `mma.set` belongs beside the call: CuTe DSL carries an MMA through loops whose
    own text sets it."""
    cute.gemm(mma, into, x[None, None, part, slot], w[None, None, part, slot], into)


def copy_halves(
    atom: cute.CopyAtom, halves: list[cute.Tensor], to: cute.Tensor, step: Int32, slot: Int32, barrier
):
    """Copy a step of both halves of W into a slot, which `barrier` counts."""
    for half in range(2):
        cute.copy(atom, halves[half][None, step], to[None, 2 * slot + half], tma_bar_ptr=barrier)
