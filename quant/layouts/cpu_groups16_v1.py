"""``cpu_groups16_v1``: the integer groups of GGUF's types, in blocks of 16 output rows, for CPU SIMD of any width.

Codes of 4, 5, 6 or 8 bits in groups along K, symmetric or with minimums; columns in order, K in whole groups. Lines of 64 bytes
hold one 32-bit word of each of 16 rows, as in ``cpu_rows16_v1``:

- 4 and 8 bits: its lines.
- 5 bits: after every 4 lines of the low 4 bits of 32 columns, one line with their fifth bits: bit f of byte j is of column 4f + j.
- 6 bits: after every 2 lines of the low 4 bits of 16 columns, one line with the rest: bits 2f and 2f + 1 of byte j are of column
  4f + j.

Slots, for B = ceil(N / 16) row blocks, G groups and S = K / 256 runs of 256 columns:

- ``codes`` uint8 [B, lines, 64].
- ``scales`` [B, G, 16] and ``offsets``, which symmetric schemes do not have: in the QuantTensor's dtype, or int8.
- ``factors`` and ``offset_factors`` float32 [B, S, 16], where those are int8: a scale is its integer times the factor of its run of 256
  columns. This holds for K-quants, whose scales are such products, bit for bit; a weight whose float32 scales are no such products
  keeps them.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme, cdiv

ROWS = 16
RUN = 256
"""Columns that share a factor."""
BITS = (4, 5, 6, 8)


def holds(scheme: QuantScheme) -> bool:
    """Integer groups without zero points, of whole steps of every width of codes, that ``cpu_rows16_v1`` does not hold."""
    group, step = scheme.group_size or 0, 32 if scheme.bits == 5 else 16
    integer = scheme.is_integer and not scheme.is_named and not scheme.zero_points
    return integer and scheme.bits in BITS and group > 0 and group % step == 0


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots with scales of 16 bits; K-quants take less."""
    rows = cdiv(n, ROWS) * ROWS
    return rows * (k * scheme.bits // 8 + scheme.groups(k) * 2 * (2 if scheme.minimums else 1))


LAYOUT = Layout(
    name="cpu_groups16_v1",
    summary="16 rows interleaved by 32-bit words, integer groups; int8 scales with a factor per 256 columns",
    slots=("codes", "scales", "offsets", "factors", "offset_factors"),
    schemes=(),
    integers=holds,
    pack="gristmill.quant.layouts._cpu_groups16:pack",
    unpack="gristmill.quant.layouts._cpu_groups16:unpack",
    rows="gristmill.quant.layouts._cpu_groups16:rows",
    size=size,
)
