"""``humming_v1``: the order in which humming's kernels (humming-kernels, Apache-2.0) read weights on the device at hand.

The library decides that order, by device and configuration, and packs on the GPU; slots are what its layer holds afterwards:

- ``weight`` int32: the codes. A symmetric integer weight that never uses its least code is stored as sign and magnitude.
- ``scales``, ``zeros``, ``global_scale``: its ``weight_scale``, ``zero_point`` and ``weight_scale_2``; empty where it has none.
- ``config`` uint8, on the CPU: the layer's configuration as JSON, which says what the others are and is handed to every call.

Unpacking asks the library where it puts every bit: its transformation moves bits and changes none.

Refused: act-order, several segments, integer scales that are not bfloat16, zero points above 15, 128-blocks cut or fused, N or K that
its tiles do not divide.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import QuantScheme

CONFIG_BYTES = 1024
"""Of the configuration, about: it is text."""


def size(scheme: QuantScheme, n: int, k: int) -> int:
    """Bytes of the slots. Zero points take four bits."""
    zeros = n * scheme.groups(k) // 2 if scheme.zero_points else 0
    return scheme.weight_bytes(n, k) - zeros + CONFIG_BYTES


LAYOUT = Layout(
    name="humming_v1",
    summary="what humming makes of a weight for the device at hand",
    slots=("weight", "scales", "zeros", "global_scale", "config"),
    schemes=(
        *(f"int4_g{group}{zero}" for zero in ("", "_zp") for group in (32, 64, 128)),
        "mxfp4",
        "nvfp4",
        "fp8",
        "fp8_block",
    ),
    pack="gristmill.quant.layouts._humming:pack",
    unpack="gristmill.quant.layouts._humming:unpack",
    size=size,
)
