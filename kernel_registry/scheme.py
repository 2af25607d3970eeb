"""Quantization schemes: how a weight's numbers are stored, as data, with a name that prints and parses.

A name is ``<weights>[.<activations>]``. The weights part says the number format, the scale granularity and, for
integers, whether zero points (``_zp``) or minimums (``_min``) are stored; the activations part, when present, says how the activations are
quantized before the product. A bare name is weight-only: ``nvfp4`` is W4A16, ``nvfp4.nvfp4`` W4A4,
``fp8_block.fp8_g128`` DeepSeek's, ``int4_g128.fp8_token`` and ``int4_g128.int8_g128`` W4A8.

=============================  ====  ==========================================  ========
weights                        bits  scales                                      groups
=============================  ====  ==========================================  ========
fp32 fp16 bf16                  32   none (16 for the last two)                  none
int4_g32 _g64 _g128 [_zp]        4   bf16 per group along K                      K / g
int4_ch [_zp]                    4   bf16 per output row                         1
int8_ch / int8_g128              8   bf16 per row / per group                    1, K/128
int<b>_g<n> / _ch [_zp | _min] 1..8  the same for any width and group            K/n, 1
fp8                              8   one float32 multiplier per segment          1
fp8_ch                           8   float32 per output row                      1
fp8_block                        8   float32 per 128 x 128 block                 ceil(K/128)
mxfp8 / mxfp4                  8, 4  E8M0 per 32 along K                         K / 32
nvfp4                            4   E4M3 per 16 along K, and a float32 global   K / 16
=============================  ====  ==========================================  ========

Integer schemes of other widths and groups, and those with minimums, parse too: checkpoints have them (GPTQ of 2 and 3
bits, compressed-tensors of 2 to 8, GGUF's K-quants). They are not in ALL_WEIGHT_SCHEMES, which kernels enumerate.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from gristmill.kernel_registry.dtypes import canonical_dtype

Granularity = Literal["dense", "tensor", "channel", "group", "block"]
ScaleDtype = Literal["bf16", "fp32", "e8m0", "e4m3"]

BLOCK: Final = 128
"""Rows and columns of one fp8_block scale (DeepSeek-V3 checkpoints)."""

ACTIVATION_FORMATS: Final[tuple[str, ...]] = (
    "fp8",
    "fp8_token",
    "fp8_g128",
    "int8_token",
    "int8_g32",
    "int8_g128",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)

DENSE_BITS: Final[dict[str, int]] = {"fp32": 32, "fp16": 16, "bf16": 16}
_SCALE_BYTES: Final[dict[str | None, int]] = {"bf16": 2, "fp32": 4, "e8m0": 1, "e4m3": 1, None: 4}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How one weight [N, K] is stored, and how its activations are quantized.

    Build one from a name with `parse`, or an integer one from its width and group with `integer`.

    Attributes:
        weight: number format: ``int4 int8 fp8 mxfp8 mxfp4 nvfp4 fp32 fp16 bf16`` (or ``int2`` ... from ``integer``).
        bits: bits per stored code.
        granularity: what one scale covers: ``dense`` (no scale), ``tensor`` (the global multiplier of a segment),
            ``channel`` (one output row), ``group`` (group_size weights of one row), ``block`` (128 x 128).
        group_size: weights along K under one scale for ``group`` and ``block``; None for a whole row and for dense;
            0 for a whole tensor.
        zero_points: whether integer zero points are stored. Without, integer codes are offset binary: the zero is
            2**(bits - 1), implicit.
        minimums: whether an offset in units of the weight is stored for each scale instead: W = code * scale - offset,
            with unsigned codes (GGUF's Q4_1, Q5_1 and K-quants).
        scale_dtype: the dtype of the scales that round to nearest writes. A checkpoint's integer or fp8 scales may also be fp16,
            bf16 or fp32; those of mx and nv formats are always as named here.
        has_global: a float32 multiplier per segment is part of the format (nvfp4, and fp8 per tensor).
        activation: one of ``ACTIVATION_FORMATS``, or None for activations in their own dtype.
    """

    weight: str
    bits: int
    granularity: Granularity
    group_size: int | None
    zero_points: bool = False
    scale_dtype: ScaleDtype | None = None
    has_global: bool = False
    activation: str | None = None
    minimums: bool = False

    @staticmethod
    def parse(name: object) -> QuantScheme:
        """The scheme called ``name``; a QuantScheme is returned as it is.

        A dense scheme has all the names of its dtype (``bfloat16``, ``half``) and by its torch.dtype.

        Raises:
            ValueError: for an unknown name; the message lists the known ones.
            TypeError: when name is neither a string, a torch.dtype nor a QuantScheme.
        """
        if isinstance(name, QuantScheme):
            return name
        if isinstance(name, str):
            return _parse(name)
        try:
            dense = _dense(name)
        except TypeError:
            raise TypeError(
                f"a scheme is a name such as 'int4_g128' or a torch.dtype, got {type(name).__name__}"
            ) from None
        if dense is None:
            raise ValueError(f"{name} is no dense scheme; known: {', '.join(DENSE_BITS)}")
        return dense

    @staticmethod
    def integer(
        bits: int, group_size: int | None, *, zero_points: bool = False, minimums: bool = False
    ) -> QuantScheme:
        """Integer scheme of any width from 1 to 8 bits, per group or (None) per channel, scales in bf16.

        Raises:
            ValueError: bits outside 1..8, a group size below 1, or both zero points and minimums.
        """
        if not 1 <= bits <= 8:
            raise ValueError(f"integer codes have 1 to 8 bits, got {bits}")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size is at least 1, or None for one scale per row, got {group_size}")
        if zero_points and minimums:
            raise ValueError("an integer scheme stores zero points or minimums, not both")
        granularity: Granularity = "channel" if group_size is None else "group"
        return QuantScheme(
            f"int{bits}", bits, granularity, group_size, zero_points, "bf16", minimums=minimums
        )

    @property
    def weights(self) -> str:
        """The name's part before the dot."""
        if self.weight.startswith("int"):
            tail = "ch" if self.group_size is None else f"g{self.group_size}"
            return f"{self.weight}_{tail}{'_zp' if self.zero_points else '_min' if self.minimums else ''}"
        if self.weight == "fp8":
            return {"tensor": "fp8", "channel": "fp8_ch", "block": "fp8_block"}[self.granularity]
        return self.weight

    @property
    def name(self) -> str:
        """The name; ``QuantScheme.parse(s.name) == s`` for every named scheme."""
        return self.weights if self.activation is None else f"{self.weights}.{self.activation}"

    def __str__(self) -> str:
        return self.name

    @property
    def is_dense(self) -> bool:
        """Plain floating point: no scales, nothing to dequantize."""
        return self.granularity == "dense"

    @property
    def is_integer(self) -> bool:
        """Codes are integers (offset binary, or unsigned with zero points)."""
        return self.weight.startswith("int")

    @property
    def symmetric(self) -> bool:
        """Neither zero points nor minimums are stored."""
        return not self.zero_points and not self.minimums

    @property
    def is_named(self) -> bool:
        """One of ALL_WEIGHT_SCHEMES, with any activations: what kernels enumerate."""
        return self.weights in _WEIGHTS

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns under one scale, for block schemes."""
        return (BLOCK, BLOCK) if self.granularity == "block" else None

    @property
    def implicit_zero(self) -> int:
        """The code that means 0 when neither zero points nor minimums are stored: 2**(bits-1) for integers, else 0."""
        return 1 << (self.bits - 1) if self.is_integer and self.symmetric else 0

    @property
    def requires_k_multiple(self) -> int:
        """K must be a multiple of this (1 = any K). Blocks may be partial, groups may not."""
        return self.group_size or 1 if self.granularity == "group" else 1

    @property
    def without_activation(self) -> QuantScheme:
        """The same weights with activations in their own dtype."""
        return self if self.activation is None else replace(self, activation=None)

    def with_int8_activation(self, act_order: bool = False) -> QuantScheme:
        """The same weights with activations quantized to int8, in blocks like the weight's groups: of 32 columns for groups of up to
        64, of 128 for larger ones and whole rows. Blocks are of consecutive columns: with act_order, whole rows.

        The scheme itself if it has an activation format, or no code of it is an integer times the scale (fp8, dense), or it is one of
        the integer schemes without a name, unless it has GGUF's groups: of a multiple of 16, in 4, 5, 6 or 8 bits, without zero points.
        """
        groups = self.is_integer and not self.zero_points and self.bits in (4, 5, 6, 8)
        groups = groups and self.group_size is not None and self.group_size % 16 == 0
        named = self.is_named and self.weight in ("int4", "int8", "mxfp4", "nvfp4")
        if self.activation is not None or not (named or groups):
            return self
        blocks = "int8_g32" if (self.group_size or BLOCK) < BLOCK else "int8_g128"
        return replace(self, activation="int8_token" if act_order else blocks)

    def groups(self, k: int) -> int:
        """Scale columns of a row of k weights: 0 when the format has no scales tensor (dense, fp8 per tensor)."""
        if self.granularity in ("dense", "tensor"):
            return 0
        return cdiv(k, self.group_size) if self.group_size else 1

    def scale_shape(self, n: int, k: int) -> tuple[int, int] | None:
        """Shape of the scales of an [n, k] weight, or None when there is no scales tensor."""
        groups = self.groups(k)
        if self.granularity in ("dense", "tensor"):
            return None
        return (cdiv(n, BLOCK) if self.granularity == "block" else n, groups)

    def code_bytes(self, k: int) -> int:
        """Bytes of one row of codes: ceil(k * bits / 8)."""
        return cdiv(k * self.bits, 8)

    def weight_bytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] QuantTensor: codes, scales, zero points (one byte each) or minimums, one global multiplier."""
        total = n * self.code_bytes(k)
        shape = self.scale_shape(n, k)
        if shape is not None:
            total += shape[0] * shape[1] * self._bytes_per_group
        return total + (4 if self.has_global else 0)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of a large matrix: codes, scales and zero points; per-row and per-tensor parts vanish."""
        extra = 0.0
        if self.group_size and self.scale_dtype is not None:
            covered = self.group_size * (BLOCK if self.granularity == "block" else 1)
            extra = 8.0 * self._bytes_per_group / covered
        return self.bits + extra

    @property
    def scale_bytes(self) -> int:
        """Bytes of one stored scale; 4, a float32 multiplier, where the scheme has none of its own."""
        return _SCALE_BYTES[self.scale_dtype]

    @property
    def _bytes_per_group(self) -> int:
        """Bytes of a scale and what is stored beside it, as round to nearest writes them."""
        own = 0 if self.scale_dtype is None else self.scale_bytes
        return own + (1 if self.zero_points else own if self.minimums else 0)


def _weight_table() -> dict[str, QuantScheme]:
    schemes = [QuantScheme(name, bits, "dense", None) for name, bits in DENSE_BITS.items()]
    for zero_points in (False, True):
        schemes += [QuantScheme.integer(4, g, zero_points=zero_points) for g in (32, 64, 128, None)]
    schemes += [QuantScheme.integer(8, g) for g in (None, 128)]
    schemes += [
        QuantScheme("fp8", 8, "tensor", 0, has_global=True),
        QuantScheme("fp8", 8, "channel", None, scale_dtype="fp32"),
        QuantScheme("fp8", 8, "block", BLOCK, scale_dtype="fp32"),
        QuantScheme("mxfp8", 8, "group", 32, scale_dtype="e8m0"),
        QuantScheme("mxfp4", 4, "group", 32, scale_dtype="e8m0"),
        QuantScheme("nvfp4", 4, "group", 16, scale_dtype="e4m3", has_global=True),
    ]
    return {scheme.weights: scheme for scheme in schemes}


_WEIGHTS: Final = _weight_table()

ALL_WEIGHT_SCHEMES: Final[tuple[str, ...]] = tuple(_WEIGHTS)
"""Every name without activations, dense ones included."""

ALL_SCHEMES: Final[tuple[str, ...]] = ALL_WEIGHT_SCHEMES + tuple(
    f"{weights}.{activation}"
    for weights, scheme in _WEIGHTS.items()
    if not scheme.is_dense
    for activation in ACTIVATION_FORMATS
)
"""Every name that parses: each weight scheme, and each quantized one with each activation format."""

PAIRED_SCHEMES: Final[tuple[str, ...]] = (
    "int4_g128.fp8_token",
    "int4_g128.int8_token",
    "int4_g128.int8_g128",
    "int4_g32.int8_g32",
    "int8_ch.int8_token",
    "int8_g128.int8_g128",
    "fp8.fp8",
    "fp8.fp8_token",
    "fp8_ch.fp8_token",
    "fp8_block.fp8_g128",
    "mxfp8.mxfp8",
    "mxfp4.mxfp4",
    "mxfp4.mxfp8",
    "mxfp4.int8_g32",
    "nvfp4.nvfp4",
    "nvfp4.int8_g32",
)
"""The pairs that published checkpoints, tensor cores and integer units of CPUs use: what to enumerate where ALL_SCHEMES is too many."""


_INTEGER: Final = re.compile(r"int([1-8])_(?:g([1-9]\d{0,6})|ch)(_zp|_min)?")


def _dense(dtype: object) -> QuantScheme | None:
    """The dense scheme of a dtype; None for other dtypes, which do not say how they are scaled."""
    try:
        dtype = canonical_dtype(dtype)
    except ValueError:
        return None
    return _WEIGHTS[dtype] if dtype in DENSE_BITS else None


@lru_cache(maxsize=512)
def _parse(name: str) -> QuantScheme:
    weights, dot, activation = name.removeprefix("torch.").partition(".")
    scheme = _WEIGHTS.get(weights) or _dense(weights)
    match = _INTEGER.fullmatch(weights)
    if scheme is None and match is not None:
        bits, group, tail = match.groups()
        scheme = QuantScheme.integer(
            int(bits), int(group) if group else None, zero_points=tail == "_zp", minimums=tail == "_min"
        )
    known = f"weights: {', '.join(ALL_WEIGHT_SCHEMES)}; activations: {', '.join(ACTIVATION_FORMATS)}"
    if scheme is None:
        raise ValueError(f"unknown scheme {name!r}: no weight format {weights!r}. Known {known}")
    if not dot:
        return scheme
    if activation not in ACTIVATION_FORMATS:
        raise ValueError(f"unknown scheme {name!r}: no activation format {activation!r}. Known {known}")
    if scheme.is_dense:
        raise ValueError(
            f"scheme {name!r}: {weights} weights are not quantized, so {activation} activations have no use"
        )
    return replace(scheme, activation=activation)
