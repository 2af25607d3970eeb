"""Arguments and tiles of experts in CuTe DSL.

The number of tiles is known on the device only: a warp finds the expert of a tile by sums over the offsets.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass._mlir.dialects import nvvm

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl._pieces import eight, placeholder


def arguments(dtype):
    """Placeholders of x [rows, K], W [E, N, K], offsets [E + 1], permutation [P], bias [E, N], out [P, columns], top_k, ctas, alpha, limit."""

    def size(divisibility=1):
        return cute.sym_int32(divisibility=divisibility)

    k, experts, places = size(8), size(), size()
    return (
        placeholder(dtype, size(), k, align=16),
        placeholder(dtype, experts, size(), k, align=16),
        placeholder(Int32, size(), align=4),
        placeholder(Int32, size(), align=4),
        placeholder(dtype, size(), size(), align=2),
        placeholder(dtype, places, size(8), align=16),
        *(Int32(1), Int32(1), Float32(1), Float32(1)),
    )


class Program:
    """What the programs of a configuration have in common.

    Attributes:
        bn: rows of W of a tile. columns: of y, BN or half of it.
        slots: of the ring.
        gated, biased, clamped, gathered: what is done with sums, and whether a permutation gathers rows of x.
    """

    def __init__(self, dtype, config: Config):
        self.dtype = dtype
        self.bn, self.slots = int(config["bn"]), int(config["slots"])
        flags = str(config["epilogue"]).split("+")
        self.gated, self.biased, self.clamped = (flag in flags for flag in ("silu_mul", "bias", "clamp"))
        self.gathered = bool(config["gather"])
        self.columns = self.bn // 2 if self.gated else self.bn

    @cute.jit
    def clear(self, offsets: cute.Tensor, out: cute.Tensor, thread: Int32, threads: cutlass.Constexpr):
        """Zero this CTA's share of the rows past those of the last expert, by so many threads."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        begin, across = offsets[offsets.shape[0] - 1], out.shape[1] // 8
        zeros = cute.make_rmem_tensor((8,), self.dtype)
        zeros.fill(0.0)
        index = Int64(cta) * threads + thread
        while index < Int64(out.shape[0] - begin) * across:
            cute.autovec_copy(zeros, eight(out, begin + index // across, index % across * 8))
            index += Int64(ctas) * threads


class Gather:
    """Copies of gathered rows of 16-bit numbers to a ring by cp.async of 128 threads: eight copy a step of a row, 64 columns, each every 16th row.

    A slot is rows of 128 bytes, one after another, whose pieces of 16 bytes are exchanged by row % 8, as TMA swizzles them.
    """

    def __init__(self, ring: cute.Tensor, rows: int, x: cute.Tensor, thread: Int32):
        """ring: of slots of so many rows."""
        self.x, self.slot_bytes = x, rows * 128
        self.row, self.column = thread // 8, thread % 8 * 8
        piece = thread % 8 ^ self.row % 8
        self.to = cute.recast_ptr(ring.iterator, dtype=Uint8) + (self.row * 128 + piece * 16)

    @cute.jit
    def __call__(self, rows: cute.Tensor, count: Int32, step: Int32, slot: Int32):
        """Copy a step of 64 columns of these rows of x, of those among the first `count` of the tile: sums of the others are not stored, so that
        whatever the slot held serves for them. Columns past K are zero, as those that TMA loads.
        """
        column = step * 64 + self.column
        if column < self.x.shape[1]:  # K is whole pieces
            for i in cutlass.range_constexpr(cute.size(rows)):
                if self.row + 16 * i < count:
                    self.copy(i, slot, eight(self.x, rows[i], column))
        else:
            for i in cutlass.range_constexpr(cute.size(rows)):
                if self.row + 16 * i < count:
                    self.copy(i, slot, eight(self.x, 0, 0), cp_size=Int32(0).ir_value())

    def copy(self, i: int, slot: Int32, piece: cute.Tensor, **size):
        """16 bytes to this thread's place in row 16 i + thread / 8 of a slot; with a `size` of 0, zeros. A size that is a variable costs a copy as
        much as the rest of it."""
        to = self.to + (slot * self.slot_bytes + i * 16 * 128)
        cached = nvvm.LoadCacheModifierKind.CG
        nvvm.cp_async_shared_global(to.llvm_ptr, piece.iterator.llvm_ptr, 16, cached, **size)


@cute.jit
def find(offsets: cute.Tensor, bm: cutlass.Constexpr, wide: Int32, tile: Int32, first: Int32, before: Int32):
    """The expert of a tile of `bm` rows, the number of experts if there is none, and the index of the expert's first tile.

    wide: tiles across the columns of y. A warp searches 32 experts at a time, from expert `first` on, whose tiles come after `before` others; the
    last two results are where the search for a later tile begins.
    """
    lane = cute.arch.lane_idx()
    experts = offsets.shape[0] - 1
    expert = experts
    start = Int32(0)
    searching = first < experts
    while searching:
        tiles = Int32(0)
        if first + lane < experts:
            tiles = (offsets[first + lane + 1] - offsets[first + lane] + bm - 1) // bm * wide
        through = tiles  # of this expert and those of the lanes below
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(through, 1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                through += below
        total = cute.arch.shuffle_sync(through, 31)
        if tile < before + total:
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + through <= tile))
            expert = first + passed
            start = before + cute.arch.shuffle_sync(through - tiles, passed)
            searching = False
        else:
            before += total
            first += 32
            searching = first < experts
    return expert, start, first, before


@cute.jit
def place(
    offsets: cute.Tensor, expert: Int32, bm: cutlass.Constexpr, columns: cutlass.Constexpr, index: Int32
):
    """The first row of tile `index` of an expert, the end of the expert's rows, and the tile's first column of y, of which a tile has `columns`. Rows
    come fastest, so that CTAs that run at the same time share W."""
    begin, end = offsets[expert], offsets[expert + 1]
    high = (end - begin + bm - 1) // bm
    return begin + index % high * bm, end, cute.assume(index // high * columns, divby=columns)
