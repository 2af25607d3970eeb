"""``dense_v1``: a float weight [..., N, K] as it is.

Slots: ``weight`` [..., N, K] in float32, float16 or bfloat16, contiguous.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots."""
    return scheme.weight_bytes(n, k)


LAYOUT = Layout(
    name="dense_v1",
    summary="float weight [N, K], row-major",
    slots=("weight",),
    schemes=("fp32", "fp16", "bf16"),
    pack="gristmill.quant.layouts._dense:pack",
    unpack="gristmill.quant.layouts._dense:unpack",
    size=size,
)
