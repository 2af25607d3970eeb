"""Scales and zero points of the 16 rows of a frag16 tile, which follow its codes, in the order in which lanes read them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import numeric
from gristmill.quant.layouts.w4_frag16_v1 import TILE_ROWS, groups_per_tile
from gristmill.quant.tensor import QuantTensor

NVFP4_UNIT = 256.0
"""Products of nvfp4 codes and block scales are scaled by 2^-8; the row multiplier compensates."""
_MAX_SPREAD = 126
"""Largest ratio, in powers of two, of the scales of a row of MXFP4: beyond it bf16 products would be rounded."""


def code_order(scheme: QuantScheme) -> str:
    """int4, fp4, int8 or fp8."""
    return f"{'int' if scheme.is_integer else 'fp'}{scheme.bits}"


def check(weight: QuantTensor, name: str) -> None:
    """ValueError for a weight that the layout `name` cannot hold."""
    scheme, scales, zero = weight.scheme, weight.scales, weight.zero
    if scheme.is_integer and (scales is None or scales.dtype not in (torch.bfloat16, torch.float16)):
        raise ValueError(
            f"{name} holds bfloat16 or float16 scales, got {None if scales is None else scales.dtype}; "
            "convert them, or use another layout"
        )
    if zero is not None and zero.dtype != torch.uint8:
        raise ValueError(f"{name} holds integer zero points, got {zero.dtype}; use another layout")
    if code_order(scheme) == "fp8":
        if scales is not None and scales.dtype != torch.float32:
            raise ValueError(f"{name} holds float32 scales of {scheme}, got {scales.dtype}; convert them")
        if bool(((weight.codes & 127) == 127).any()):
            raise ValueError(f"{name}: the weight has FP8 codes that are NaN; expected finite ones")


def scale_bytes(
    scheme: QuantScheme,
    scales: Tensor,
    zero: Tensor | None,
    row_scale: Tensor | None,
    codes: Tensor,
    k: int,
    count: int,
    groups: int,
) -> tuple[Tensor, Tensor | None]:
    """One matrix's scales [N, S] (and zeros) -> uint8 [T, G, bytes], and the float32 multiplier of each row where there is one."""
    if scheme.scale_dtype == "e4m3":
        row_bytes = _nvfp4_bytes(scales.view(torch.uint8), codes, k)
        return _pairs_of_groups(
            row_bytes, count, groups, 8
        ), None if row_scale is None else row_scale * NVFP4_UNIT
    if scheme.scale_dtype == "e8m0":
        row_bytes, top = _mxfp4_bytes(scales, codes, k)
        return _pairs_of_groups(row_bytes, count, groups, 4), _power_of_two(top)
    per_tile = groups_per_tile(scheme)
    parts = [_by_lane(scales, count, groups, per_tile)]
    if zero is not None:
        parts.append(_by_lane(zero, count, groups, per_tile))
    return torch.cat(parts, -1), None


def _power_of_two(top: Tensor) -> Tensor:
    """float32 2^(top - 128) of int32 0..254, from its bits. Not torch.ldexp: for a tensor on another GPU it launches its kernel
    on the current one (pytorch issue 189567, seen with torch 2.11)."""
    return torch.where(top >= 2, (top - 1) << 23, 1 << (21 + top.clamp(max=1))).view(torch.float32)


def scales_of(
    scheme: QuantScheme, stored: Tensor, factor: Tensor | None, slots: Mapping[str, Tensor], n: int, k: int
) -> tuple[Tensor, Tensor | None]:
    """Inverse of scale_bytes: scales [N, S], zeros [N, S] or None, for K columns."""
    if scheme.scale_dtype == "e4m3":
        table = torch.zeros(256, dtype=torch.uint8, device=stored.device)
        table[_e5m3(stored.device).long()] = torch.arange(127, dtype=torch.uint8, device=stored.device)
        columns = scheme.groups(k)
        return table[_ungroup(stored, 8)[:n, :columns].long()].view(torch.float8_e4m3fn), None
    if scheme.scale_dtype == "e8m0" and factor is not None:
        top = torch.frexp(factor).exponent - 1 + 128
        return (_ungroup(stored, 4)[:n, : scheme.groups(k)].int() - 254 + top[:, None]).to(torch.uint8), None
    per_tile, dtype = groups_per_tile(scheme), slots["scale_type"].dtype
    size = per_tile * TILE_ROWS * dtype.itemsize
    columns = max(scheme.groups(k), 1) if scheme.group_size else stored.shape[1]
    scales = _by_row(stored[..., :size], dtype, per_tile)[:n, :columns]
    if not scheme.zero_points:
        return scales.contiguous(), None
    return scales.contiguous(), _by_row(stored[..., size:], torch.uint8, per_tile)[:n, :columns].contiguous()


def _by_lane(per_group: Tensor, count: int, groups: int, per_tile: int) -> Tensor:
    """[N, S] -> bytes [T, G, ...]: for g = 0..7, for each group of the tile, row g and row g + 8. A single column applies to every group."""
    columns, size = groups * per_tile, per_group.element_size()
    if per_group.shape[1] == 1:
        per_group = per_group.expand(-1, columns)
    octets = per_group.contiguous().view(torch.uint8).view(per_group.shape[0], -1)
    octets = pad(
        octets, (0, (columns - per_group.shape[1]) * size, 0, count * TILE_ROWS - per_group.shape[0])
    )
    return (
        octets.view(count, 2, 8, groups, per_tile, size).permute(0, 3, 2, 4, 1, 5).reshape(count, groups, -1)
    )


def _by_row(stored: Tensor, dtype: torch.dtype, per_tile: int) -> Tensor:
    """Inverse of _by_lane, with its padding: [16 T, G * per_tile]."""
    count, groups = stored.shape[:2]
    split = stored.reshape(count, groups, 8, per_tile, 2, dtype.itemsize).permute(0, 4, 2, 1, 3, 5)
    return split.reshape(count * TILE_ROWS, -1).contiguous().view(dtype)


def _pairs_of_groups(octets: Tensor, count: int, groups: int, per_tile: int) -> Tensor:
    """uint8 [N, S] -> [T, G, ...]: for g, for each two groups of the tile, both of row g and both of row g + 8."""
    octets = pad(octets, (0, groups * per_tile - octets.shape[1], 0, count * TILE_ROWS - octets.shape[0]))
    split = octets.view(count, 2, 8, groups, per_tile // 2, 2).permute(0, 3, 2, 4, 1, 5)
    return split.reshape(count, groups, -1)


def _ungroup(stored: Tensor, per_tile: int) -> Tensor:
    """Inverse of _pairs_of_groups, with its padding."""
    count, groups = stored.shape[:2]
    split = stored.reshape(count, groups, 8, per_tile // 2, 2, 2).permute(0, 4, 2, 1, 3, 5)
    return split.reshape(count * TILE_ROWS, -1)


def _e5m3(device: torch.device) -> Tensor:
    """Of each E4M3 byte 0..126 its value as five bits of exponent (bias 21) and three of mantissa, always normal; 0 is 0."""
    value = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(value)
    bits = (exponent - 1 + 21) * 8 + (mantissa * 16 - 8).int()
    return torch.where(value > 0, bits, 0).to(torch.uint8)


def _nvfp4_bytes(scales: Tensor, codes: Tensor, k: int) -> Tensor:
    """E4M3 bytes [N, S] -> the bytes of `_e5m3`. ValueError for scales that they cannot represent."""
    if bool((scales > 126).any()):
        raise ValueError("f4_frag16_v1 holds block scales of 0 and above; the weight has negative ones")
    if bool((scales == 0).any()) and bool((_used(codes, k, 16) & (scales == 0)).any()):
        raise ValueError(
            "f4_frag16_v1: the weight has block scales of 0 over codes that are not 0; set the codes to 0"
        )
    return _e5m3(scales.device)[scales.long()]


def _mxfp4_bytes(scales: Tensor, codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """E8M0 bytes [N, S] -> bytes relative to the row's largest, which is 254, and that largest byte [N]."""
    top = scales.amax(1).int()
    below = top[:, None] - scales.int()
    if bool((below > _MAX_SPREAD).any()) and bool((_used(codes, k, 32) & (below > _MAX_SPREAD)).any()):
        raise ValueError(
            f"f4_frag16_v1: a row's scales of used groups lie more than 2**{_MAX_SPREAD} apart; use another layout"
        )
    return (254 - below).to(torch.uint8), top


def _used(codes: Tensor, k: int, size: int) -> Tensor:
    """Which groups [N, S] hold a code that is not 0."""
    values = numeric.unpack_bits(codes, 4, k) & 7
    return pad(values, (0, -k % size)).view(codes.shape[0], -1, size).any(-1)
