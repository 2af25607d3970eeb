"""``cpu_rows16_v1``: blocks of 16 output rows, interleaved by 32-bit words, for CPU SIMD of any width.

A 64-byte line holds one 32-bit word of each of 16 rows, word r of row 16 * b + r: one AVX-512 register, two AVX2 ones,
four of NEON, with one output row in each lane, so that neither decoding nor accumulation crosses lanes. A word holds
32 / bits consecutive columns of its row:

- 4 bits, 8 columns: bits 8j..8j+3 are column 8i + j and bits 8j+4..8j+7 column 8i + 4 + j (j = 0..3). The low nibbles
  of the line are thus 4 columns per lane, the operand order of VNNI and of NEON's dot product, and the high nibbles the next 4.
- 8 bits, 4 columns: byte j is column 4i + j, the same operand order.
- 16 bits, 2 columns: half j is column 2i + j, the operand order of AVX-512 BF16. 32 bits: one column.

Slots, for B = ceil(N / 16) row blocks and K' = K rounded up to whole groups (to 32 where a row has one scale or none):

- ``codes`` uint8 [..., B, K' * bits / 32, 64]. Padded columns and rows decode to exactly 0.
- ``scales`` [..., B, G, 16] in the QuantTensor's dtype (E8M0 uint8, E4M3 float8_e4m3fn, else float32, float16 or
  bfloat16); padded rows have scale bits of 1.0. fp8_block is spread over the rows (float32, group 128); fp8 per tensor
  is one float32 per row. Empty for dense schemes.
- ``zeros`` [..., B, G, 16] uint8 or float; empty for symmetric schemes, whose zero is 2**(bits - 1).
- ``row_scale`` float32 [..., B, 16]: nvfp4's global multiplier of each row (1 in padded rows); else empty.
- ``perm`` int32 [K']: as in plain_v1; empty when columns are in order, and then x is read up to K only.

Column k' belongs to scale column k' // group_size (0 when there is one scale per row).
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme, cdiv

ROWS = 16
"""Output rows of a block: 32-bit lanes of 512 bits."""
K_MULTIPLE = 32
"""K is padded to this where no group size says more."""


def padded_k(scheme: QuantScheme, k: int) -> int:
    """Columns stored for a row of k weights in order."""
    multiple = scheme.group_size or K_MULTIPLE
    return cdiv(k, multiple) * multiple


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots."""
    rows = cdiv(n, ROWS) * ROWS
    codes = rows * padded_k(scheme, k) * scheme.bits // 8
    if scheme.is_dense:
        return codes
    groups = max(1, scheme.groups(k))
    total = codes + rows * groups * (scheme.scale_bytes + int(scheme.zero_points))
    return total + (4 * rows if scheme.weight == "nvfp4" else 0)


LAYOUT = Layout(
    name="cpu_rows16_v1",
    summary="16 rows interleaved by 32-bit words, scales [blocks, groups, 16]",
    slots=("codes", "scales", "zeros", "row_scale", "perm"),
    schemes=ALL_WEIGHT_SCHEMES,
    pack="gristmill.quant.layouts._cpu_rows16:pack",
    unpack="gristmill.quant.layouts._cpu_rows16:unpack",
    rows="gristmill.quant.layouts._cpu_rows16:rows",
    size=size,
)
