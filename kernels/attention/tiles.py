"""Tile sizes and splits of the Triton attention kernels: pure functions of the problem and the target."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import ITEM_BYTES

DEFAULT_MULTIPROCESSORS = 108
SMALLEST_SHARED = 64 * 1024
"""Shared memory per block for targets that do not state it: every GPU in use has at least this."""

SPLIT_FLOOR = 256
"""Minimum number of keys in a part of a split context: shorter parts cost more to merge than they gain."""


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, and at least 16 (a tile side that tl.dot takes)."""
    return max(16, 1 << (n - 1).bit_length())


def tile_config(dk: int, dv: int, dtype: str, rows: int, target: Target) -> Config:
    """Tile of `rows` rows: keys per step, stages and warps such that the staged keys and values fit in shared memory."""
    item = ITEM_BYTES[dtype]
    row_width = power_of_two(dk) + power_of_two(dv)
    limit = (target.smem_bytes or SMALLEST_SHARED) * 3 // 4
    keys, stages = 64 if dtype != "fp32" else 32, 2 if target.vendor == "nvidia" else 1
    queries = rows * power_of_two(dk) * item
    while keys > 16 and queries + keys * row_width * item * stages > limit:
        keys //= 2
    if queries + keys * row_width * item * stages > limit:
        stages = 1
    return {"m": rows, "n": keys, "warps": _warps(rows * power_of_two(dv), dtype, target), "stages": stages}


def _warps(accumulators: int, dtype: str, target: Target) -> int:
    """Warps that hold `accumulators` floats and all other values without spilling.

    RDNA's 32 lanes have 256 registers each, and float32 products take twice the operands.
    """
    if target.vendor == "amd" and target.wave_size == 32:
        return 16 if dtype == "fp32" else 8
    return 8 if accumulators >= 128 * 128 else 4


def packing(group: int, rows: int) -> tuple[int, int]:
    """(tiles per group of query heads of a KV head, query tokens per tile) for tiles of `rows` rows."""
    head_tiles = cdiv(group, rows)
    return head_tiles, rows // cdiv(group, head_tiles)


def tile_bound(tokens: int, seqs: int, tile_q: int) -> int:
    """Upper bound on the number of tiles of `tokens` tokens in `seqs` sequences of any lengths."""
    return tokens // tile_q + seqs


def reach(max_q: int, max_ctx: int, window: int) -> int:
    """Upper bound on the keys that one tile sees."""
    return min(max_ctx, window + max_q) if window > 0 else max_ctx


def split_count(programs: int, most: int, max_ctx: int) -> int:
    """Parts per context such that `programs` programs per part are about `most` in total; no part is shorter than SPLIT_FLOOR."""
    return max(1, min(most // max(programs, 1), max_ctx // SPLIT_FLOOR))


def part_length(max_ctx: int, splits: int, step: int) -> int:
    """Keys of a part, a multiple of `step`."""
    return cdiv(max_ctx, splits * step) * step


def mla_config(latent: int, rope: int, dtype: str, rows: int, target: Target) -> Config:
    """Tile of the latent kernels: the staged cache rows fit in shared memory beside the queries."""
    item = ITEM_BYTES[dtype]
    row_bytes = (power_of_two(latent) + power_of_two(max(rope, 1))) * item
    limit = (target.smem_bytes or SMALLEST_SHARED) * 3 // 4
    keys, stages = 32, 2 if target.vendor == "nvidia" else 1
    while keys > 16 and (rows + keys * stages) * row_bytes > limit:
        keys //= 2
    if (rows + keys * stages) * row_bytes > limit:
        stages = 1
    return {
        "m": rows,
        "n": keys,
        "warps": _warps(rows * power_of_two(latent), dtype, target),
        "stages": stages,
    }
