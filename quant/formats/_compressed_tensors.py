"""The tensors of compressed-tensors' formats, one function per format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant import numeric
from gristmill.quant.formats import words
from gristmill.quant.formats.contract import (
    FLOATS,
    FormatError,
    Place,
    Source,
    StoredWeight,
    as_bytes,
    as_float32,
    make,
    need,
    one_number,
)
from gristmill.quant.sharding import drop_regular
from gristmill.quant.tensor import QuantTensor


@dataclass(frozen=True)
class Module:
    """A module of a checkpoint, and how its config group stores it.

    Attributes:
        shape: the shape of its weight, [..., N, K].
        scheme: the scheme of its weight.
        activation: the activation format that the checkpoint declares, or None.
        static: whether the scale of activations is stored.
        place: allocates the codes.
    """

    source: Source
    name: str
    shape: tuple[int, ...]
    scheme: QuantScheme
    activation: str | None
    static: bool
    place: Place

    def has(self, part: str) -> bool:
        """Whether there is a tensor ``NAME.part``."""
        return f"{self.name}.{part}" in self.source

    def read(self, part: str, shape: tuple[int, ...] | None, *dtypes: torch.dtype) -> Tensor:
        """The tensor ``NAME.part``; FormatError when it is not there or not as expected."""
        return self.source.read(f"{self.name}.{part}", shape, dtypes=dtypes)

    def need(self, what: str, *parts: str) -> None:
        """FormatError unless all these tensors are there."""
        need(self.source, self.name, tuple(f".{part}" for part in parts), what)

    def make(self, codes: Tensor, scales: Tensor | None, **others: Tensor | None) -> QuantTensor:
        """The weight; `others` are further fields of a QuantTensor."""
        return make(self.name, codes, scales, self.shape, self.scheme, **others)

    def stored(self, weight: QuantTensor, *parts: str) -> StoredWeight:
        """The weight with the names of the tensors that it is made of."""
        return StoredWeight(weight, tuple(f"{self.name}.{part}" for part in parts), self.activation)

    def scales(self) -> Tensor:
        """[..., N, groups] or [..., block rows, block columns]; one scale per tensor is repeated for all rows."""
        scales = self.read("weight_scale", None, *FLOATS)
        return self.per_group(as_float32(scales) if self.scheme.weight == "fp8" else scales, "weight_scale")

    def per_group(self, stored: Tensor, part: str) -> Tensor:
        """Scales or zero points as `scales` returns them; FormatError for another shape."""
        expected = (*self.shape[:-2], *(self.scheme.scale_shape(*self.shape[-2:]) or ()))
        if tuple(stored.shape) == expected:
            return stored
        if (
            self.scheme.granularity == "channel"
            and tuple(stored.shape) == expected[:-1]
            and len(expected) > 1
        ):
            return stored[..., None]
        if self.scheme.granularity == "channel" and stored.numel() == 1:
            return stored.reshape(1).expand(expected).clone()
        raise FormatError(
            f"tensor {self.name}.{part} must have shape {list(expected)}, got {list(stored.shape)}"
        )


def packed(module: Module) -> StoredWeight:
    """Integers of 1 to 8 bits in int32 words."""
    module.need("pack-quantized integers", "weight_packed", "weight_scale")
    shape, scheme = module.shape, module.scheme
    bits, (n, k) = scheme.bits, shape[-2:]
    parts = ["weight_packed", "weight_scale"]
    width = module.source.spec(f"{module.name}.weight_packed")[1][-1:]
    dense, padded = (cdiv(k * bits, 32),), (cdiv(k, 32 // bits),)
    is_dense = width == dense
    stored = (*shape[:-1], *(width if width in (dense, padded) else dense))
    weight_words = module.read("weight_packed", stored, torch.int32)
    if is_dense:
        codes = words.stream(weight_words, bits, k)
    else:
        codes = numeric.pack_bits(words.padded_codes(weight_words, bits, k), bits)
    if module.has("weight_shape"):
        parts.append("weight_shape")
        stored_shape = module.read("weight_shape", (len(shape),), torch.int64, torch.int32).tolist()
        if stored_shape != list(shape):
            raise FormatError(
                f"tensor {module.name}.weight_shape says {stored_shape}, and the model's weight is {list(shape)}"
            )
    g_idx = None
    if module.has("weight_g_idx"):
        parts.append("weight_g_idx")
        g_idx = _g_idx(module, k)
    scales = module.scales()
    zero = None
    if scheme.zero_points:
        module.need("asymmetric integers", "weight_zero_point")
        parts.append("weight_zero_point")
        count = cdiv(n * bits, 32) if is_dense else cdiv(n, 32 // bits)
        along_n = module.read("weight_zero_point", (*shape[:-2], count, scheme.groups(k)), torch.int32)
        unpack = words.codes if is_dense else words.padded_codes
        zero = unpack(along_n.transpose(-1, -2).contiguous(), bits, n).transpose(-1, -2).contiguous()
    weight = module.make(codes, scales, zero=zero, g_idx=g_idx)
    return _with_input(module, module.stored(weight, *parts), False)


def plain(module: Module) -> StoredWeight:
    """int8 or float8, one byte per weight."""
    shape, scheme = module.shape, module.scheme
    module.need(f"{scheme.weight} weights", "weight", "weight_scale")
    parts = ["weight", "weight_scale"]
    if scheme.weight == "fp8":
        codes = as_bytes(module.read("weight", shape, torch.float8_e4m3fn))
        if scheme.granularity == "tensor":
            global_scale = one_number(module.source, f"{module.name}.weight_scale")
            weight = module.make(codes, None, global_scale=global_scale)
        else:
            weight = module.make(codes, module.scales())
        return _with_input(module, module.stored(weight, *parts), False)
    if scheme.bits != 8:
        raise FormatError(
            f"{module.name}: {scheme.bits}-bit integers one per byte are not read; known: int8, or pack-quantized"
        )
    signed = as_bytes(module.read("weight", shape, torch.int8))
    codes = torch.bitwise_xor(signed, 0x80, out=module.place(tuple(signed.shape)))
    scales = module.scales()
    zero = None
    if scheme.zero_points:
        module.need("asymmetric integers", "weight_zero_point")
        parts.append("weight_zero_point")
        zero_points = module.read("weight_zero_point", None, torch.int8)
        zero = module.per_group(zero_points.contiguous().view(torch.uint8) ^ 0x80, "weight_zero_point")
    weight = module.make(codes, scales, zero=zero)
    return _with_input(module, module.stored(weight, *parts), False)


def nvfp4(module: Module) -> StoredWeight:
    """E2M1 with E4M3 scales and a global divisor."""
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    module.need("NVFP4", *parts)
    codes, scales = _floats4(module, 16, torch.float8_e4m3fn)
    multiplier = 1 / one_number(module.source, f"{module.name}.weight_global_scale")
    weight = module.make(codes, scales, global_scale=multiplier)
    return _with_input(module, module.stored(weight, *parts), True)


def mxfp4(module: Module) -> StoredWeight:
    """E2M1 with E8M0 scales."""
    module.need("MXFP4", "weight_packed", "weight_scale")
    codes, scales = _floats4(module, 32, torch.uint8)
    return module.stored(module.make(codes, scales), "weight_packed", "weight_scale")


def mxfp8(module: Module) -> StoredWeight:
    """E4M3 with E8M0 scales."""
    module.need("MXFP8", "weight", "weight_scale")
    *rows, k = module.shape
    codes = as_bytes(module.read("weight", module.shape, torch.float8_e4m3fn))
    scales = module.read("weight_scale", (*rows, k // 32), torch.uint8)
    return module.stored(module.make(codes, scales), "weight", "weight_scale")


def _floats4(module: Module, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    *rows, k = module.shape
    if k % group:
        raise FormatError(f"{module.name}: groups of {group} along K, and K is {k}")
    codes = module.read("weight_packed", (*rows, k // 2), torch.uint8)
    return codes, module.read("weight_scale", (*rows, k // group), dtype)


def _g_idx(module: Module, k: int) -> Tensor | None:
    """Group of each column; older files store -1 for all columns if there is no order."""
    g_idx, scheme = module.read("weight_g_idx", (k,), torch.int32, torch.int64), module.scheme
    groups = scheme.groups(k)
    if bool((g_idx == -1).all()):
        return None
    low, high = (int(v) for v in g_idx.aminmax())
    if low < 0 or high >= groups or scheme.granularity != "group":
        raise FormatError(
            f"tensor {module.name}.weight_g_idx must name groups 0..{groups - 1}, got {low}..{high}"
        )
    return drop_regular(g_idx.to(torch.int32, copy=True), scheme.group_size or k)


def _with_input(module: Module, stored: StoredWeight, divisor: bool) -> StoredWeight:
    """`stored` with the static activation scale, a divisor in NVFP4; FormatError if the configuration declares one that is missing."""
    part = "input_global_scale" if divisor else "input_scale"
    if not module.has(part):
        if module.static:
            raise FormatError(f"{module.name}: static activation scales need tensor {module.name}.{part}")
        return stored
    parts = [part, *(["input_zero_point"] if module.has("input_zero_point") else [])]
    scale = one_number(module.source, f"{module.name}.{part}")
    names = (*stored.names, *(f"{module.name}.{part}" for part in parts))
    return replace(stored, names=names, input_scale=1 / scale if divisor else scale)
