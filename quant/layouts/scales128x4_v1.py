"""``scales128x4_v1``: codes in QuantTensor's order, scales in the tiles that tcgen05's block-scaled products take.

Slots, for a weight [..., N, K] with G groups of columns:

- ``codes`` uint8 [..., N, K * bits / 8]: as in plain_v1, low nibble = even k.
- ``scales`` uint8 [..., ceil(N / 128), ceil(G / 4), 512]: tiles of 128 rows by 4 groups, bytes of E4M3 (nvfp4) or E8M0. The scale of row n and group
  g is byte 16 (n % 32) + 4 (n % 128 // 32) + g % 4 of tile (n // 128, g // 4). Past N and G bytes are 0.
- ``row_scale`` float32 [..., N]: nvfp4's global multiplier of each row, to be applied to the sum; else empty.

A tile is 32 rows of 16 bytes, the unit that tcgen05.cp copies to every quarter of the lanes of tensor memory (PTX ISA, scale factors of
tcgen05.mma); CUTLASS and cuBLAS take the same order. Refused: act-order.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme, cdiv

ROWS, GROUPS = 128, 4
"""Of a tile."""


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots."""
    scales = cdiv(n, ROWS) * cdiv(scheme.groups(k), GROUPS) * ROWS * GROUPS
    return n * scheme.code_bytes(k) + scales + (4 * n if scheme.has_global else 0)


LAYOUT = Layout(
    name="scales128x4_v1",
    summary="codes [N, K bits], scales in tiles of 128 rows by 4 groups",
    slots=("codes", "scales", "row_scale"),
    schemes=("nvfp4", "mxfp4", "mxfp8"),
    pack="gristmill.quant.layouts._scales128x4:pack",
    unpack="gristmill.quant.layouts._scales128x4:unpack",
    size=size,
)
