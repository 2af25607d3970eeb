"""``w4_frag16_v1``: 4-bit integer weights with groups of 128 in the fragment order of NVIDIA's 16-row matrix instructions.

A tile is 16 output rows by 128 columns in 1056 bytes: 1024 of codes, then the 16 rows' scales. It is one contiguous copy
from memory, and a warp's lanes read their codes of it by two 16-byte loads each, straight into the A operand of
``mma.m16n8k16`` (of ``wgmma``, with four tiles for 64 rows), so one packing serves every number of tokens.

Byte 512 * h + 16 * lane + 4 * w (h = 0..1, w = 0..3) starts the 32-bit word of lane = 4 g + t for columns 16 s .. 16 s + 15,
s = 4 h + w. Bits 4 i .. 4 i + 3 of it are row g + 8 (i % 2), column 16 s + 8 (i // 2) + 2 t, and bits 16 + 4 i .. the column
after that: both land in one 16-bit pair by one shift. Scales follow at byte 1024 + 4 g: row g, then row g + 8.

Tiles of 64 rows are neighbours: [ceil(N / 64)][K' / 128][tiles of the block, at most 4], so that 4224 bytes are contiguous.

Slots:

- ``tiles`` uint8 [..., bytes]. Rows past N hold code 8 (which is 0) and scale 0.
- ``scale_type`` an empty tensor of the scales' dtype, bfloat16 or float16. float32 scales are refused.
- ``perm`` int32 [K']: as in plain_v1; empty when columns are in order.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme

TILE_ROWS, TILE_K, BLOCK_TILES = 16, 128, 4
TILE_BYTES = TILE_ROWS * TILE_K // 2 + TILE_ROWS * 2


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots."""
    return -(-n // TILE_ROWS) * -(-k // TILE_K) * TILE_BYTES


LAYOUT = Layout(
    name="w4_frag16_v1",
    summary="tiles of 16 rows x 128 columns, codes in matrix-fragment order beside their scales",
    slots=("tiles", "scale_type", "perm"),
    schemes=("int4_g128",),
    pack="gristmill.quant.layouts._w4_frag16:pack",
    unpack="gristmill.quant.layouts._w4_frag16:unpack",
    size=size,
)
