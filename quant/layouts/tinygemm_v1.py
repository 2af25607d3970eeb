"""``tinygemm_v1``: symmetric int4 weights as torch's own int4 product (``torch._weight_int4pack_mm``, tinygemm) reads them on CUDA.

A tile is 8 output rows by 128 columns (8 steps of 16), two steps to a word: word [n / 8, k / 128, lane 4 g + t, pair p] holds, of
row 8 · (n / 8) + g and from column 128 · (k / 128) + 32 p on, columns 2 t, 2 t + 8, 2 t + 16, 2 t + 24 in bits 0, 4, 8, 12 and the
columns after those in bits 16, 20, 24, 28.

Slots:

- ``tiles`` int32 [N / 8, K / 128, 32, 4]: the codes.
- ``scales`` bfloat16 [K / group, N, 2]: each group's scale, and 0, which the product adds: 4 bytes where others have 2.

Refused: scales that are not bfloat16, N no multiple of 8, K none of 128, act-order.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots."""
    return n * k // 2 + n * scheme.groups(k) * 4


LAYOUT = Layout(
    name="tinygemm_v1",
    summary="tiles of 8 rows x 128 columns in the order of torch's int4 product",
    slots=("tiles", "scales"),
    schemes=("int4_g32", "int4_g64", "int4_g128"),
    pack="gristmill.quant.layouts._tinygemm:pack",
    unpack="gristmill.quant.layouts._tinygemm:unpack",
    size=size,
)
