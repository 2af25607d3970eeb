"""The weight formats in the tiles of w4_frag16_v1 that are compiled for sm_80 and newer: one source each, `_linear_<format>_<schedule>_sm80.cu`."""

from __future__ import annotations

from typing import NamedTuple

from gristmill.kernel_registry.scheme import QuantScheme


class Format(NamedTuple):
    """A compiled weight format.

    Attributes:
        name: its name in the library, `format` in configurations.
        schemes: the schemes that are stored in it.
        tile_bytes: bytes per tile of 16 rows x 128 columns, scales included.
    """

    name: str
    schemes: tuple[str, ...]
    tile_bytes: int


FORMATS = (
    Format("int4_g128", ("int4_g128", "int4_ch"), 1056),
    Format("int4_g64", ("int4_g64",), 1088),
    Format("int4_g32", ("int4_g32",), 1152),
    Format("int4_g128_zp", ("int4_g128_zp", "int4_ch_zp"), 1072),
    Format("int4_g64_zp", ("int4_g64_zp",), 1120),
    Format("int4_g32_zp", ("int4_g32_zp",), 1216),
)


def format_of(scheme: QuantScheme) -> Format | None:
    """The format that holds a scheme; None if none does."""
    return next((form for form in FORMATS if scheme.name in form.schemes), None)
