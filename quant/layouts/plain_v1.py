"""``plain_v1``: QuantTensor's own order, contiguous, with act-order and odd blocks resolved for kernels.

Slots, for a weight [..., N, K] (K' = K unless the columns were sorted, see perm):

- ``codes`` uint8 [..., N, ceil(K' * bits / 8)]: bit stream along K', low nibble = even k'.
- ``scales`` [..., N, G]; fp8_block: float32 [..., block rows, block columns]. fp8 per tensor: float32 [..., N, 1], the
  multiplier of each row's segment, so that fp8 and fp8_ch are one kernel. E8M0 as uint8 bytes, E4M3 as float8_e4m3fn;
  integer and fp8 scales in the QuantTensor's dtype (bfloat16 after round to nearest, float16 in many checkpoints).
- ``zeros`` uint8 or float [..., N, G], like the scales; empty for symmetric schemes, whose zero is 2**(bits - 1). Of
  schemes with minimums the offsets in units of the weight: W = code * scale - offset.
- ``row_scale`` float32 [..., N]: nvfp4's global multiplier of each row, to be applied to the accumulated output; else
  empty.
- ``row_block`` int32 [N]: fp8_block's scale row of each n (n // 128 unless blocks were cut or fused); else empty.
- ``perm`` int32 [K']: empty when column k' is column k. Otherwise the kernel reads x[perm[k']], and 0 where perm is
  -1: the columns were sorted by group and each group padded to whole runs of the group size.

Column k' belongs to scale column k' // group_size always (0 when there is one scale per row).
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots."""
    total = scheme.weight_bytes(n, k)
    if scheme.has_global:  # one float32 per row instead of one per segment
        total += 4 * n - 4
    if scheme.granularity == "block":  # row_block
        total += 4 * n
    return total


LAYOUT = Layout(
    name="plain_v1",
    summary="codes [N, K bits], scales [N, groups], columns sorted by group",
    slots=("codes", "scales", "zeros", "row_scale", "row_block", "perm"),
    schemes=tuple(name for name in ALL_WEIGHT_SCHEMES if not QuantScheme.parse(name).is_dense),
    pack="gristmill.quant.layouts._plain:pack",
    unpack="gristmill.quant.layouts._plain:unpack",
    size=size,
    any_integer=True,
)
