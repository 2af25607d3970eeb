"""``w4_frag16_v1``: 4-bit integer weights in the fragment order of NVIDIA's 16-row matrix instructions, scales beside them.

A tile is 16 output rows by 128 columns: 1024 bytes of codes, then the 16 rows' scales (and zero points). It is one contiguous
copy from memory, and a warp's lanes read their codes of it by two 16-byte loads each, straight into the A operand of
``mma.m16n8k16`` (of ``wgmma``, with four tiles for 64 rows), so one packing serves every number of tokens.

Byte 512 * h + 16 * lane + 4 * w (h = 0..1, w = 0..3) starts the 32-bit word of lane = 4 g + t for columns 16 s .. 16 s + 15,
s = 4 h + w. Bits 4 i .. 4 i + 3 of it are row g + 8 (i % 2), column 16 s + 8 (i // 2) + 2 t, and bits 16 + 4 i .. the column
after that: both land in one 16-bit pair by one shift.

With P groups per tile (4, 2 or 1; one scale per row is stored as P = 1, again in every tile), scales follow at byte 1024 + 4 P g:
for each group row g, then row g + 8. Zero points, a byte each, follow at 1024 + 32 P + 2 P g in the same order.

Tiles of 64 rows are neighbours: [ceil(N / 64)][ceil(K' / 128)][tiles of the block, at most 4], so that four tiles are contiguous.

Slots:

- ``tiles`` uint8 [..., bytes]. Rows past N and columns past K' hold code 8 (0 with zero points); rows past N have scale 0.
- ``scale_type`` an empty tensor of the scales' dtype, bfloat16 or float16. float32 scales are refused.
- ``perm`` int32 [K']: as in plain_v1; empty when columns are in order.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme, cdiv

TILE_ROWS, TILE_K, BLOCK_TILES = 16, 128, 4


def groups_per_tile(scheme: QuantScheme) -> int:
    """Scales that a row of a tile has."""
    return max(1, TILE_K // scheme.group_size) if scheme.group_size else 1


def tile_bytes(scheme: QuantScheme) -> int:
    """Bytes of a tile of any frag16 layout: codes, scales, zero points."""
    each = scheme.scale_bytes + int(scheme.zero_points)
    return TILE_ROWS * TILE_K * scheme.bits // 8 + TILE_ROWS * groups_per_tile(scheme) * each


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots; nvfp4 and mxfp4 have one float32 per row besides the tiles."""
    tiles = cdiv(n, TILE_ROWS) * cdiv(k, TILE_K) * tile_bytes(scheme)
    return tiles + (4 * n if scheme.bits == 4 and not scheme.is_integer else 0)


LAYOUT = Layout(
    name="w4_frag16_v1",
    summary="tiles of 16 rows x 128 columns, codes in matrix-fragment order beside their scales",
    slots=("tiles", "scale_type", "perm"),
    schemes=tuple(f"int4_{group}{zero}" for zero in ("", "_zp") for group in ("g32", "g64", "g128", "ch")),
    pack="gristmill.quant.layouts._frag16:pack_w4",
    unpack="gristmill.quant.layouts._frag16:unpack",
    size=size,
)
