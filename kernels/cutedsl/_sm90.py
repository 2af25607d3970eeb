"""What programs of CuTe DSL for Hopper have in common: wgmma, its layouts in shared memory, and a tile of y on its way from registers to memory.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warp
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

LOADERS = 128
"""Threads of warpgroup 0, which loads; the others multiply."""


def wgmma(dtype, groups: int, columns: int):
    """wgmma of `groups` warpgroups, 64 rows each, on two operands in shared memory whose rows are contiguous along K."""
    major = OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, major, major, Float32, (groups, 1, 1), (64, columns)
    )


def ring_layout(dtype, rows: int, step: int, slots: int):
    """The layout of `slots` slots of [rows, step] of an operand."""
    return hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (rows, rows, step), dtype, slots)


def tile_layout(dtype, rows: int, columns: int):
    """The layout of a tile of y."""
    return hopper_helpers.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (rows, columns), 1)


class Store:
    """A tile of y [rows, columns], from the registers of `groups` warpgroups to memory by way of shared memory, in pieces of 16 bytes.

    Args:
        sums: the wgmma whose sums have y's layout in registers.
        shared: the tile in shared memory.
        thread: this one's number among those that multiply.
    """

    def __init__(self, dtype, sums: cute.TiledMma, shared: cute.Tensor, thread: Int32, groups: int):
        self.rows, self.columns = cute.size(shared, mode=[0]), cute.size(shared, mode=[1])
        self.threads, across = 128 * groups, self.columns // 8
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        self.to_shared = cute.make_tiled_copy_C(atom, sums)
        self.own = self.to_shared.get_slice(thread).partition_D(shared)
        self.to_memory = cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128),
            cute.make_layout((self.threads // across, across), stride=(across, 1)),
            cute.make_layout((1, 8)),
        ).get_slice(thread)
        self.pieces = self.to_memory.partition_S(shared)
        self.places = self.to_memory.partition_S(cute.make_identity_tensor((self.rows, self.columns)))

    def __call__(self, y: cute.Tensor, out: cute.Tensor, rows: Int32, columns: Int32):
        """y: this thread's part of the tile, rounded. out: memory that begins at the tile, of which `rows` and `columns` are written."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)  # the tile before has been read
        cute.copy(self.to_shared, self.to_shared.retile(y), self.own[None, None, None, 0])
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
        to = self.to_memory.partition_D(cute.local_tile(out, (self.rows, self.columns), (0, 0)))
        store_pieces(self.pieces, self.places, to, rows, columns)


@cute.jit
def store_pieces(pieces: cute.Tensor, places: cute.Tensor, to: cute.Tensor, rows: Int32, columns: Int32):
    """Write this thread's pieces of a tile that lie within its rows and columns."""
    for i in cutlass.range_constexpr(cute.size(places, mode=[1])):
        row, column = places[0, i, 0]
        if row < rows and column < columns:
            eight = cute.make_fragment_like(pieces[None, i, 0, 0])
            cute.autovec_copy(pieces[None, i, 0, 0], eight)
            cute.autovec_copy(eight, to[None, i, 0])
