"""The tensors of compressed-tensors' formats, one function per format."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
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


def packed(
    source: Source,
    module: str,
    shape: tuple[int, ...],
    scheme: QuantScheme,
    activation: str | None,
    static: bool,
    place: Place,
) -> StoredWeight:
    """Integers of 1 to 8 bits in int32 words."""
    need(source, module, (".weight_packed", ".weight_scale"), "pack-quantized integers")
    bits, (n, k) = scheme.bits, shape[-2:]
    names = [f"{module}.weight_packed", f"{module}.weight_scale"]
    width = source.spec(names[0])[1][-1:]
    dense, padded = cdiv(k * bits, 32), cdiv(k, 32 // bits)
    weight_words = source.read(
        names[0],
        (*shape[:-1], *(width if width in ((dense,), (padded,)) else (dense,))),
        dtypes=(torch.int32,),
    )
    is_dense = width == (dense,)
    codes = (
        words.stream(weight_words, bits, k)
        if is_dense
        else _pack(words.padded_codes(weight_words, bits, k), bits)
    )
    if f"{module}.weight_shape" in source:
        names.append(f"{module}.weight_shape")
        stored_shape = source.read(names[-1], (len(shape),), dtypes=(torch.int64, torch.int32)).tolist()
        if stored_shape != list(shape):
            raise FormatError(
                f"tensor {names[-1]} says {stored_shape}, and the model's weight is {list(shape)}"
            )
    g_idx = None
    if f"{module}.weight_g_idx" in source:
        names.append(f"{module}.weight_g_idx")
        g_idx = _g_idx(source, names[-1], scheme, k)
    scales = _scales(source, module, shape, scheme)
    zero = None
    if scheme.zero_points:
        need(source, module, (".weight_zero_point",), "asymmetric integers")
        names.append(f"{module}.weight_zero_point")
        groups = scheme.groups(k)
        count = cdiv(n * bits, 32) if is_dense else cdiv(n, 32 // bits)
        along_n = source.read(names[-1], (*shape[:-2], count, groups), dtypes=(torch.int32,)).transpose(
            -1, -2
        )
        unpack = words.codes if is_dense else words.padded_codes
        zero = unpack(along_n.contiguous(), bits, n).transpose(-1, -2).contiguous()
    weight = make(module, codes, scales, shape, scheme, zero, g_idx=g_idx)
    return _with_input(source, module, StoredWeight(weight, tuple(names), activation), False, static)


def plain(
    source: Source,
    module: str,
    shape: tuple[int, ...],
    scheme: QuantScheme,
    activation: str | None,
    static: bool,
    place: Place,
) -> StoredWeight:
    """int8 or float8, one byte per weight."""
    need(source, module, (".weight", ".weight_scale"), f"{scheme.weight} weights")
    names = [f"{module}.weight", f"{module}.weight_scale"]
    if scheme.weight == "fp8":
        codes = as_bytes(source.read(names[0], shape, dtypes=(torch.float8_e4m3fn,)))
        if scheme.granularity == "tensor":
            weight = make(module, codes, None, shape, scheme, global_scale=one_number(source, names[1]))
        else:
            weight = make(module, codes, _scales(source, module, shape, scheme), shape, scheme)
        return _with_input(source, module, StoredWeight(weight, tuple(names), activation), False, static)
    if scheme.bits != 8:
        raise FormatError(
            f"{module}: {scheme.bits}-bit integers one per byte are not read; known: int8, or pack-quantized"
        )
    signed = as_bytes(source.read(names[0], shape, dtypes=(torch.int8,)))
    codes = torch.bitwise_xor(signed, 0x80, out=place(tuple(signed.shape)))
    scales = _scales(source, module, shape, scheme)
    zero = None
    if scheme.zero_points:
        need(source, module, (".weight_zero_point",), "asymmetric integers")
        names.append(f"{module}.weight_zero_point")
        zero_points = source.read(names[-1], dtypes=(torch.int8,))
        zero = _spread(zero_points.contiguous().view(torch.uint8) ^ 0x80, names[-1], shape, scheme)
    weight = make(module, codes, scales, shape, scheme, zero)
    return _with_input(source, module, StoredWeight(weight, tuple(names), activation), False, static)


def nvfp4(
    source: Source,
    module: str,
    shape: tuple[int, ...],
    scheme: QuantScheme,
    activation: str | None,
    static: bool,
    place: Place,
) -> StoredWeight:
    """E2M1 with E4M3 scales and a global divisor."""
    need(source, module, (".weight_packed", ".weight_scale", ".weight_global_scale"), "NVFP4")
    names = [f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_global_scale")]
    codes, scales = _floats4(source, module, shape, 16, torch.float8_e4m3fn)
    multiplier = 1 / one_number(source, names[2])
    weight = make(module, codes, scales, shape, scheme, global_scale=multiplier)
    return _with_input(source, module, StoredWeight(weight, tuple(names), activation), True, static)


def mxfp4(
    source: Source,
    module: str,
    shape: tuple[int, ...],
    scheme: QuantScheme,
    activation: str | None,
    static: bool,
    place: Place,
) -> StoredWeight:
    """E2M1 with E8M0 scales."""
    need(source, module, (".weight_packed", ".weight_scale"), "MXFP4")
    codes, scales = _floats4(source, module, shape, 32, torch.uint8)
    return StoredWeight(
        make(module, codes, scales, shape, scheme),
        (f"{module}.weight_packed", f"{module}.weight_scale"),
        activation,
    )


def mxfp8(
    source: Source,
    module: str,
    shape: tuple[int, ...],
    scheme: QuantScheme,
    activation: str | None,
    static: bool,
    place: Place,
) -> StoredWeight:
    """E4M3 with E8M0 scales."""
    need(source, module, (".weight", ".weight_scale"), "MXFP8")
    codes = as_bytes(source.read(f"{module}.weight", shape, dtypes=(torch.float8_e4m3fn,)))
    scales = source.read(f"{module}.weight_scale", (*shape[:-1], shape[-1] // 32), dtypes=(torch.uint8,))
    return StoredWeight(
        make(module, codes, scales, shape, scheme), (f"{module}.weight", f"{module}.weight_scale"), activation
    )


def _floats4(
    source: Source, module: str, shape: tuple[int, ...], group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    k = shape[-1]
    if k % group:
        raise FormatError(f"{module}: groups of {group} along K, and K is {k}")
    codes = source.read(f"{module}.weight_packed", (*shape[:-1], k // 2), dtypes=(torch.uint8,))
    return codes, source.read(f"{module}.weight_scale", (*shape[:-1], k // group), dtypes=(dtype,))


def _scales(source: Source, module: str, shape: tuple[int, ...], scheme: QuantScheme) -> Tensor:
    """[..., N, groups] or [..., block rows, block columns]; one scale per tensor is repeated for all rows."""
    stored_scales = source.read(f"{module}.weight_scale", dtypes=FLOATS)
    return _spread(
        as_float32(stored_scales) if scheme.weight == "fp8" else stored_scales,
        f"{module}.weight_scale",
        shape,
        scheme,
    )


def _spread(stored: Tensor, name: str, shape: tuple[int, ...], scheme: QuantScheme) -> Tensor:
    expected = (*shape[:-2], *(scheme.scale_shape(*shape[-2:]) or ()))
    if tuple(stored.shape) == expected:
        return stored
    if scheme.granularity == "channel" and tuple(stored.shape) == expected[:-1] and len(expected) > 1:
        return stored[..., None]
    if scheme.granularity == "channel" and stored.numel() == 1:
        return stored.reshape(1).expand(expected).clone()
    raise FormatError(f"tensor {name} must have shape {list(expected)}, got {list(stored.shape)}")


def _g_idx(source: Source, name: str, scheme: QuantScheme, k: int) -> Tensor | None:
    """Group of each column; older files store -1 for all columns if there is no order."""
    g_idx = source.read(name, (k,), dtypes=(torch.int32, torch.int64))
    groups = scheme.groups(k)
    if bool((g_idx == -1).all()):
        return None
    low, high = (int(v) for v in g_idx.aminmax())
    if low < 0 or high >= groups or scheme.granularity != "group":
        raise FormatError(f"tensor {name} must name groups 0..{groups - 1}, got {low}..{high}")
    return drop_regular(g_idx.to(torch.int32, copy=True), scheme.group_size or k)


def _with_input(
    source: Source, module: str, stored: StoredWeight, divisor: bool, static: bool
) -> StoredWeight:
    """`stored` with the static activation scale, a divisor in NVFP4; FormatError if the configuration declares one that is missing."""
    name = f"{module}.{'input_global_scale' if divisor else 'input_scale'}"
    if name not in source:
        if static:
            raise FormatError(f"{module}: static activation scales need tensor {name}")
        return stored
    scale = one_number(source, name)
    extra = [name] + [n for n in (f"{module}.input_zero_point",) if n in source]
    return StoredWeight(
        stored.weight,
        (*stored.names, *extra),
        stored.activation,
        1 / scale if divisor else scale,
        stored.pre_scale,
    )


def _pack(codes: Tensor, bits: int) -> Tensor:
    from gristmill.quant import numeric

    return numeric.pack_bits(codes, bits)
