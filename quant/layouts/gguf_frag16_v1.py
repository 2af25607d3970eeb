"""``gguf_frag16_v1``: the integer groups of GGUF's types in tiles of 16 rows x 128 columns, in the fragment order of 16-row matrix instructions.

A tile is three parts, each in the order in which a lane reads it. Lane 4 g + t has rows g and g + 8, and of every step s = 0..7 the columns
16 s + 8 c + 2 t + odd (c, odd = 0..1); r = 0..1 stands for row g + 8 r.

1. The low four bits of the codes: 1024 bytes, those of a tile of w4_frag16_v1.
2. Of 5 bits, 256 bytes: byte 8 * lane + 4 * (s // 4) + 2 * odd + c has the fifth bit at bit 2 * (s % 4) + r. Of 6 bits, 512 bytes: byte
   16 * lane + 4 * (s // 2) + 2 * odd + c has the upper two bits from bit 4 * (s % 2) + 2 * r on.
3. The scales of the tile's P groups (4 of 32 columns, or 8 of 16). Under 16-bit scales (Q4_1, Q5_0, Q5_1): at 4 P g for each group row g,
   then row g + 8; the offsets of schemes with minimums at 64 P/2 + 4 P g in the same order. Under float32 scales (Q4_K, Q5_K, Q6_K) a row of a
   tile has a float16 d, and for each group a byte, whose product is the scale, bit for bit:

   - with minimums (s of 0..255; an offset is dmin * m likewise): at 8 g the d of rows g and g + 8, then their dmin; at 64 + 16 g, for each
     half of the tile, s of its first group of rows g and g + 8, then of its second group, then m in the same order.
   - without (s of -128..127, stored plus 128): at 4 g the d of rows g and g + 8; at 32 + 16 g for each group s of rows g and g + 8.

The value is scale * code - offset; without minimums scale * (code - 2^(bits - 1)). Blocks of tiles are those of w4_frag16_v1.

Slots:

- ``tiles`` uint8 [..., bytes]. Rows past N have scales and offsets of 0; codes past N and K' are 0.
- ``scale_type`` an empty tensor of the scales' dtype: float16 or bfloat16, float32 where they are products.
- ``perm`` int32 [K']: as in plain_v1; empty when columns are in order.

Refused: float32 scales or offsets that are no such products, as where a K-quant is cut along K at another column than a multiple of 128;
scales and offsets of different dtypes.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant.layouts.w4_frag16_v1 import TILE_K, TILE_ROWS, groups_per_tile

LOW_BYTES = TILE_ROWS * TILE_K // 2
"""Of a tile, the low four bits of its codes."""
FACTORED = ("int4_g32_min", "int5_g32_min", "int6_g16")
"""The schemes of Q4_K, Q5_K and Q6_K, whose float32 scales are products."""


def code_bytes(scheme: QuantScheme) -> int:
    """Bytes of a tile's codes."""
    return TILE_ROWS * TILE_K * scheme.bits // 8


def tile_bytes(scheme: QuantScheme, factored: bool = False) -> int:
    """Bytes of a tile; factored: its scales are products of a float16 and integers."""
    kinds, groups = 2 if scheme.minimums else 1, groups_per_tile(scheme)
    per_row = kinds * (2 + groups) if factored else kinds * 2 * groups
    return code_bytes(scheme) + TILE_ROWS * per_row


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots with scales of 16 bits; products take less."""
    return cdiv(n, TILE_ROWS) * cdiv(k, TILE_K) * tile_bytes(scheme)


LAYOUT = Layout(
    name="gguf_frag16_v1",
    summary="the tiles of w4_frag16_v1 for GGUF's groups of 4, 5 and 6 bits, with minimums, and scales that are products",
    slots=("tiles", "scale_type", "perm"),
    schemes=("int4_g32_min", "int5_g32", "int5_g32_min", "int6_g16"),
    pack="gristmill.quant.layouts._gguf_frag16:pack",
    unpack="gristmill.quant.layouts._gguf_frag16:unpack",
    rows="gristmill.quant.layouts._gguf_frag16:rows",
    size=size,
)
