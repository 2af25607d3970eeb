"""Product of e4m3 codes in CuTe DSL for Hopper: persistent CTAs, TMA, wgmma, sums of 128 columns added up in float32 registers.

The tensor core keeps about 14 bits of a sum of e4m3 products. So the sums of each slot of 128 columns are added to others in registers, times the
scales of x and W there (DeepSeek-V3's two-level accumulation; DeepSeek-AI, 2024). Warpgroup 0 fills a ring of slots by TMA; the two others
multiply 64 rows each. docs/performance/log/linear_w8a8.md has what became of it.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from functools import cache

import cutlass
import torch
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cutedsl import Source, program
from gristmill.kernels.cutedsl._pieces import advance, allocate, initialize, placeholder, shared_tensor
from gristmill.kernels.cutedsl._sm90 import LOADERS, Store, ring_layout, tile_layout, wgmma
from lab.peers.libraries.cutedsl import TILE

BK = 128
"""Columns of a slot, and of a group of scales."""
GROUPS = 2
"""Warpgroups that multiply."""


def multiply(x: Tensor, w: Tensor, x_scales: Tensor, w_scales: Tensor, out: Tensor) -> None:
    """x e4m3 [M, K], W e4m3 [N, K], x's scales float32 [M, groups of K], those of a group behind each other, W's [N / 128, groups] -> out [M, N]."""
    config = {**TILE, "x": "bf16" if out.dtype == torch.bfloat16 else "fp16", "arch": "sm_90a"}
    made = program(fp8_product, config)
    made(x.view(torch.uint8), w.view(torch.uint8), x_scales, w_scales, out, processors(out.get_device()))


@cache
def processors(device: int) -> int:
    """CTAs."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def fp8_product(config: Config) -> Source:
    """A program of (x uint8 [M, K], W uint8 [N, K], x's scales float32 [M, groups of K], W's float32 [N / 128, groups], out [M, N], ctas)."""
    dtype = cutlass.BFloat16 if config["x"] == "bf16" else cutlass.Float16
    m, n, k, groups = (
        cute.sym_int32(),
        cute.sym_int32(divisibility=8),
        cute.sym_int32(divisibility=16),
        cute.sym_int32(),
    )
    x, w = (placeholder(Uint8, rows, k, align=16) for rows in (m, n))
    of_x = make_fake_tensor(Float32, (m, groups), stride=(1, cute.sym_int64()), assumed_align=4)
    of_w = placeholder(Float32, cute.sym_int32(), groups, align=4)
    return Source(Fp8Product(dtype, config), (x, w, of_x, of_w, placeholder(dtype, m, n, align=16), Int32(1)))


class Fp8Product:
    """The program of one configuration.

    Attributes:
        bm, bn: rows of x and of W of a tile, which has one scale for 128 columns. slots: of the ring.
    """

    def __init__(self, dtype, config: Config):
        self.dtype = dtype
        self.bm, self.bn, self.slots = (int(config[name]) for name in ("bm", "bn", "slots"))

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        x_scales: cute.Tensor,
        w_scales: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        """Describe tiles, rings and TMA descriptors, and launch `ctas` CTAs."""
        x, w = cute.recast_tensor(x, Float8E4M3FN), cute.recast_tensor(w, Float8E4M3FN)
        ring_x = ring_layout(Float8E4M3FN, self.bm, BK, self.slots)
        ring_w = ring_layout(Float8E4M3FN, self.bn, BK, self.slots)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one = (None, None, 0)
        tma_x, x_by_tma = cpasync.make_tiled_tma_atom(load, x, cute.slice_(ring_x, one), (self.bm, BK))
        tma_w, w_by_tma = cpasync.make_tiled_tma_atom(load, w, cute.slice_(ring_w, one), (self.bn, BK))
        self.kernel(
            wgmma(Float8E4M3FN, GROUPS, self.bn),
            (tma_x, x_by_tma),
            (tma_w, w_by_tma),
            (ring_x, ring_w, tile_layout(self.dtype, self.bm, self.bn)),
            x_scales,
            w_scales,
            out,
        ).launch(grid=(ctas, 1, 1), block=(LOADERS + GROUPS * 128, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_x: tuple[cute.CopyAtom, cute.Tensor],
        load_w: tuple[cute.CopyAtom, cute.Tensor],
        layouts: tuple[cute.ComposedLayout, ...],
        x_scales: cute.Tensor,
        w_scales: cute.Tensor,
        out: cute.Tensor,
    ):
        """Every `ctas`-th tile, rows of x fastest, so that CTAs that run at the same time share W. A load is a TMA atom and what it copies from."""
        (tma_x, x_by_tma), (tma_w, w_by_tma), (ring_x, ring_w, tile_out) = load_x, load_w, layouts
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = SmemAllocator()
        barriers = allocate(memory, self.slots)
        sx = shared_tensor(memory, Float8E4M3FN, ring_x)
        sw = shared_tensor(memory, Float8E4M3FN, ring_w)
        so = shared_tensor(memory, self.dtype, tile_out)
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_x)
            cpasync.prefetch_descriptor(tma_w)
            initialize(barriers, self.slots, 1, 4 * GROUPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        m, n = out.shape
        high, wide = (m + self.bm - 1) // self.bm, (n + self.bn - 1) // self.bn
        steps = (x_by_tma.shape[1] + BK - 1) // BK
        full, empty = barriers
        tile, slot, phase = Int32(cta), Int32(0), Int32(0)
        if warp_index < LOADERS // 32:
            cute.arch.setmaxregister_decrease(40)
            if warp_index == 0:
                whole = cute.make_layout(1)
                while tile < high * wide:
                    rows_x = cute.local_tile(x_by_tma, (self.bm, BK), (tile % high, None))
                    rows_w = cute.local_tile(w_by_tma, (self.bn, BK), (tile // high, None))
                    to_x, from_x = cpasync.tma_partition(
                        tma_x, 0, whole, cute.group_modes(sx, 0, 2), cute.group_modes(rows_x, 0, 2)
                    )
                    to_w, from_w = cpasync.tma_partition(
                        tma_w, 0, whole, cute.group_modes(sw, 0, 2), cute.group_modes(rows_w, 0, 2)
                    )
                    for step in range(steps):
                        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, (self.bm + self.bn) * BK)
                        cute.copy(tma_x, from_x[None, step], to_x[None, slot], tma_bar_ptr=full + slot)
                        cute.copy(tma_w, from_w[None, step], to_w[None, slot], tma_bar_ptr=full + slot)
                        slot, phase = advance(slot, phase, self.slots)
                    tile += ctas
        else:
            cute.arch.setmaxregister_increase(232)
            thread -= LOADERS
            group = cute.arch.make_warp_uniform(thread // 128)
            own = mma.get_slice(cute.make_layout(GROUPS, stride=128)(group))
            fragments_x = mma.make_fragment_A(own.partition_A(sx))
            fragments_w = mma.make_fragment_B(own.partition_B(sw))
            part = cute.make_rmem_tensor(mma.partition_shape_C((self.bm, self.bn)), Float32)
            sums = cute.make_fragment_like(part)
            y = cute.make_fragment_like(part, self.dtype)
            places = mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.bm, self.bn)))
            store = Store(self.dtype, mma, so, thread, GROUPS)
            while tile < high * wide:
                m0 = tile % high * self.bm
                n0 = cute.assume(tile // high * self.bn, divby=self.bn)
                # A thread's sums are of two rows of x, 8 apart; past the last row their scales are not used.
                rows = [cutlass.min(m0 + places[2 * half][0], m - 1) for half in range(2)]
                sums.fill(0.0)
                for step in range(steps):
                    of_block = w_scales[tile // high, step]
                    factors = [x_scales[rows[0], step] * of_block, x_scales[rows[1], step] * of_block]
                    cute.arch.mbarrier_wait(full + slot, phase)
                    warpgroup.fence()
                    for k32 in cutlass.range_constexpr(BK // 32):
                        mma.set(warpgroup.Field.ACCUMULATE, k32 > 0)
                        cute.gemm(
                            mma,
                            part,
                            fragments_x[None, None, k32, slot],
                            fragments_w[None, None, k32, slot],
                            part,
                        )
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + slot)
                    for i in cutlass.range(cute.size(part) // 4, unroll_full=True):
                        for j in cutlass.range_constexpr(4):
                            sums[4 * i + j] += part[4 * i + j] * factors[j // 2]
                    slot, phase = advance(slot, phase, self.slots)
                y.store(sums.load().to(self.dtype))
                store(y, cute.domain_offset((m0, n0), out), m - m0, n - n0)
                tile += ctas
