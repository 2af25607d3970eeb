"""Weight-only linear for Hopper whose rows have the same bits in every batch (`gemm_ws.cuh`): linear_w4a16_invariant_sm90 and
linear_w8a16_invariant_sm90.

Configurations of the schedule `gemm_ws` with one accumulator and one warpgroup along K, and with a split along K that depends on N
and K alone. Each element is then the sum of the same products in the same order, whatever M is: a tile of any number of rows of x is
the same sequence of wgmma along K, and the sums of a cluster's CTAs meet in the order of their ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90._kernel import Family, kernel
from gristmill.kernels.linear.frag16_sm90.instances import Format

COLUMNS = 2
"""Blocks of 64 rows of W of a CTA, in all shapes: the split is then the same for all of them."""
MOST_SPLIT = 4


def split_of(n: int, k: int, processors: int) -> int:
    """CTAs that share a tile along K: as many as there is room for at the smallest M, at most 4."""
    tiles, groups, split = cdiv(n, COLUMNS * 64), cdiv(k, 128), 1
    while split < MOST_SPLIT and tiles * split * 2 <= processors + processors // 8 and groups >= split * 2:
        split *= 2
    return split


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the tiles that keep the order of additions, best first."""
    shapes = [s for s in gemm_ws.shapes_of(form) if s.chains == 1 and s.slices == 1 and s.c == COLUMNS]
    costs, split = [], split_of(n, k, processors)
    for shape in shapes:
        if not gemm_ws.divides(split, shape):
            continue
        partition = gemm_ws.Partition(split, 0, processors * shape.ctas)
        costs.append(
            (
                gemm_ws.microseconds(form, shape, partition, m, n, k, processors),
                gemm_ws.config_of(form, shape, partition, m, n, k),
            )
        )
    return tuple(sorted(costs, key=lambda pair: pair[0]))


INVARIANT = Family(
    schedule=gemm_ws.SCHEDULE,
    ranked=ranked,
    tried=1,
    misfit=gemm_ws.misfit,
    rows=None,
    summary="any M: {} in register operands of wgmma, sums along K in an order that does not depend on M",
    priority=40,
    gates=gemm_ws.gates,
)

KERNELS = tuple(
    replace(kernel(name, INVARIANT, bits), batch_invariant=True, space=None, estimate=None, proven="")
    for name, bits in (("linear_w4a16_invariant_sm90", 4), ("linear_w8a16_invariant_sm90", 8))
)
