"""The weight formats that are compiled for sm_80 and newer: one source each, `_linear_<format>_<schedule>_sm80.cu`."""

from __future__ import annotations

from typing import NamedTuple

from gristmill.kernel_registry.scheme import QuantScheme


class Format(NamedTuple):
    """A compiled weight format.

    Attributes:
        name: its name in the library, `format` in configurations.
        schemes: the schemes that are stored in it.
        layout: the layout of the tiles.
        tile_bytes: bytes per tile of 16 rows x 128 columns, scales included.
        words: registers of a lane that hold its part of a tile.
        more: of GGUF's formats, registers that sums and scales take besides, per 8 rows of x.
        factored: the scales of its weights are float32, products that the tiles hold as their factors.
    """

    name: str
    schemes: tuple[str, ...]
    layout: str
    tile_bytes: int
    words: int
    more: int = 0
    factored: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return QuantScheme.parse(self.schemes[0]).bits


FORMATS = (
    Format("int4_g128", ("int4_g128", "int4_ch"), "w4_frag16_v1", 1056, 9),
    Format("int4_g64", ("int4_g64",), "w4_frag16_v1", 1088, 10),
    Format("int4_g32", ("int4_g32",), "w4_frag16_v1", 1152, 12),
    Format("int4_g128_zp", ("int4_g128_zp", "int4_ch_zp"), "w4_frag16_v1", 1072, 10),
    Format("int4_g64_zp", ("int4_g64_zp",), "w4_frag16_v1", 1120, 11),
    Format("int4_g32_zp", ("int4_g32_zp",), "w4_frag16_v1", 1216, 14),
    Format("mxfp4", ("mxfp4",), "f4_frag16_v1", 1088, 10),
    Format("nvfp4", ("nvfp4",), "f4_frag16_v1", 1152, 12),
    Format("int8", ("int8_g128", "int8_ch"), "w8_frag16_v1", 2080, 17),
    Format("int8_g32", ("int8_g32",), "w8_frag16_v1", 2176, 20),
    Format("fp8", ("fp8", "fp8_ch", "fp8_block"), "w8_frag16_v1", 2112, 18),
    Format("int4_g32_min", ("int4_g32_min",), "gguf_frag16_v1", 1280, 16, 8),
    Format("int4_g32_min_k", ("int4_g32_min",), "gguf_frag16_v1", 1216, 14, 8, True),
    Format("int5_g32", ("int5_g32",), "gguf_frag16_v1", 1408, 14, 8),
    Format("int5_g32_min", ("int5_g32_min",), "gguf_frag16_v1", 1536, 18, 20),
    Format("int5_g32_min_k", ("int5_g32_min",), "gguf_frag16_v1", 1472, 16, 8, True),
    Format("int6_g16", ("int6_g16",), "gguf_frag16_v1", 1792, 20, 20),
    Format("int6_g16_k", ("int6_g16",), "gguf_frag16_v1", 1696, 17, 8, True),
)
"""The sources have the same bytes and words."""


def format_of(scheme: QuantScheme, factored: bool = False) -> Format | None:
    """The format that holds a scheme under scales of 16 bits (or of the scheme's own type), or under products; None if none does."""
    held = (form for form in FORMATS if scheme.name in form.schemes and form.factored == factored)
    return next(held, None)
