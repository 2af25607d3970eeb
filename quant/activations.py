"""Quantized activations: the reference quantizers, and QuantAct, the form in which operators pass them on.

===========  =========================================================  ==============================================
format       values                                                     scales (layout "row": row-major, row by row)
===========  =========================================================  ==============================================
fp8          float8_e4m3fn [..., K]                                     float32 [1]: given (static), or amax / 448
fp8_token    float8_e4m3fn [..., K]                                     float32 [..., 1]: amax / 448
fp8_g128     float8_e4m3fn [..., K]                                     float32 [..., ceil(K/128)]: max(amax, 1e-4) / 448
int8_token   int8 [..., K]                                              float32 [..., 1]: amax / 127
int8_g32     int8 [..., K]                                              float32 [..., ceil(K/32)]: amax / 127
int8_g128    int8 [..., K]                                              float32 [..., ceil(K/128)]: amax / 127
mxfp8        float8_e4m3fn [..., K]                                     uint8 E8M0 [..., K/32]: floor(log2 amax) - 8
mxfp4        uint8 [..., K/2], low nibble = even k                      uint8 E8M0 [..., K/32]: floor(log2 amax) - 2
nvfp4        uint8 [..., K/2], low nibble = even k                      float8_e4m3fn [..., K/16], and global_scale
===========  =========================================================  ==============================================

Every rounding is to nearest with ties to even, after an IEEE float32 division by the scale, saturating. The amax of
fp8, fp8_token and the int8 formats is at least 1e-10, so that rows of zeros have a scale. fp8_g128 is DeepSeek-V3's rule.
Groups of fp8_g128, int8_g32 and int8_g128 may be partial at the end of a row. A NaN in a row makes its scale NaN, and so
remains visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import ACTIVATION_FORMATS
from gristmill.quant import numeric
from gristmill.quant.numeric import divide
from gristmill.quant.tensor import scales_to_float32

MIN_AMAX: Final = 1e-10
MIN_AMAX_G128: Final = 1e-4
_GROUP: Final = {
    "fp8_g128": 128,
    "int8_g32": 32,
    "int8_g128": 128,
    "mxfp8": 32,
    "mxfp4": 32,
    "nvfp4": 16,
}
_PARTIAL: Final = ("fp8_g128", "int8_g32", "int8_g128")
"""Formats whose last group of a row may be shorter."""
_EMAX: Final = {"mxfp8": 8, "mxfp4": 2}


@dataclass(frozen=True, eq=False)
class QuantAct:
    """Quantized activations of logical shape [..., K].

    Attributes:
        format: one of ACTIVATION_FORMATS.
        values, scales: as in the table above.
        k: K, which packed 4-bit values do not determine.
        layout: order of the scales; "row" is row-major [..., groups].
        global_scale: nvfp4's float32 multiplier, [1] or, one for each row, [..., 1]; else None.
    """

    format: str
    values: Tensor
    scales: Tensor
    k: int
    layout: str = "row"
    global_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., K]."""
        return (*self.values.shape[:-1], self.k)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """value * scale * global in float32, in that order, rounded once to dtype; [..., K]."""
        if self.layout != "row":
            raise ValueError(f"dequantize reads scales of layout 'row', got {self.layout!r}")
        packed = self.format in ("mxfp4", "nvfp4")
        if packed:
            value = numeric.e2m1_decode(numeric.unpack_bits(self.values, 4, self.k))
        else:
            value = self.values.to(torch.float32)
        scale = scales_to_float32(self.scales)
        group = _GROUP.get(self.format)
        if group is not None:
            scale = scale.repeat_interleave(group, -1)[..., : self.k]
        value = value * scale
        return (value if self.global_scale is None else value * self.global_scale).to(dtype)


def quantize_activation(
    x: Tensor, format: str, *, scale: Tensor | None = None, by_row: bool = False
) -> QuantAct:
    """Quantizes activations x [..., K], float32, float16 or bfloat16, by the rules of the module.

    Args:
        scale: fp8: the static scale, float32 of one element. nvfp4: the static global multiplier (ModelOpt's
            input_scale). None: taken from the tensor, as amax / 448 and amax / (6 * 448).
        by_row: nvfp4: a global multiplier for each row, taken from that row. Other formats but fp8 have nothing that rows share.

    Raises:
        ValueError: unknown format; K not a multiple of the group of mxfp8, mxfp4, nvfp4; a scale for another format; fp8, or a given
            scale, by row.
        TypeError: x is not floating point.
    """
    if format not in ACTIVATION_FORMATS:
        raise ValueError(f"unknown activation format {format!r}; known: {', '.join(ACTIVATION_FORMATS)}")
    if not x.is_floating_point():
        raise TypeError(f"activations are floating point, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"activations are [..., K] with K at least 1, got {list(x.shape)}")
    k, group = x.shape[-1], _GROUP.get(format)
    if group is not None and format not in _PARTIAL and k % group:
        raise ValueError(f"{format} has groups of {group} along K, and K = {k} is not a multiple of {group}")
    if scale is not None:
        if format not in ("fp8", "nvfp4"):
            raise ValueError(
                f"{format} computes its scales from the activations; only fp8 and nvfp4 take a scale"
            )
        if scale.numel() != 1:
            raise ValueError(f"the given scale is one number, got shape {list(scale.shape)}")
        scale = scale.to(device=x.device, dtype=torch.float32).reshape(1)
    if by_row and (format == "fp8" or scale is not None):
        raise ValueError(
            f"by_row computes what rows of {format} share from each row; expected another format, and no scale"
        )
    w = x.to(torch.float32)
    if format == "fp8":
        tensor_scale = (
            divide(_tensor_amax(w).clamp(min=MIN_AMAX), numeric.E4M3_MAX) if scale is None else scale
        )
        return QuantAct(format, _e4m3(w / tensor_scale), tensor_scale, k)
    if format == "nvfp4":
        return _nvfp4(w, scale, by_row)
    if group is None:
        amax = w.abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX)
        if format == "int8_token":
            scales = divide(amax, 127)
            return QuantAct(format, _int8(w / scales), scales, k)
        scales = divide(amax, numeric.E4M3_MAX)
        return QuantAct(format, _e4m3(w / scales), scales, k)
    grouped = torch.nn.functional.pad(w, (0, -k % group)).unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1)
    if format.startswith("int8"):
        scales = divide(amax.clamp(min=MIN_AMAX), 127)
        return QuantAct(format, _int8((grouped / scales[..., None]).flatten(-2)[..., :k]), scales, k)
    if format == "fp8_g128":
        scales = divide(amax.clamp(min=MIN_AMAX_G128), numeric.E4M3_MAX)
        return QuantAct(
            format, _e4m3((grouped / scales[..., None]).flatten(-2)[..., :k]).contiguous(), scales, k
        )
    byte = numeric.e8m0_encode(numeric.floor_log2(amax) - _EMAX[format])
    byte = torch.where(torch.isfinite(amax), byte, torch.full_like(byte, numeric.E8M0_NAN))
    scaled = (grouped / numeric.e8m0_decode(byte)[..., None]).flatten(-2)
    return QuantAct(format, _e4m3(scaled) if format == "mxfp8" else _e2m1(scaled), byte, k)


def _nvfp4(w: Tensor, scale: Tensor | None, by_row: bool) -> QuantAct:
    multiplier = scale
    if multiplier is None:
        amax = w.abs().amax(-1, keepdim=True) if by_row else _tensor_amax(w)
        multiplier = divide(amax.clamp(min=MIN_AMAX), numeric.E2M1_MAX * numeric.E4M3_MAX)
    grouped = w.unflatten(-1, (-1, 16))
    unrounded_scales = grouped.abs().amax(-1) / (numeric.E2M1_MAX * multiplier)
    scales = unrounded_scales.clamp(2.0**-9, numeric.E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = grouped / (scales.to(torch.float32) * multiplier)[..., None]
    return QuantAct("nvfp4", _e2m1(scaled.flatten(-2)), scales, w.shape[-1], global_scale=multiplier)


def _tensor_amax(w: Tensor) -> Tensor:
    return w.abs().amax().view(1) if w.numel() else torch.zeros(1, device=w.device, dtype=torch.float32)


def _int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8).contiguous()


def _e4m3(x: Tensor) -> Tensor:
    return numeric.e4m3_encode(x).view(torch.float8_e4m3fn)


def _e2m1(x: Tensor) -> Tensor:
    """Packed codes; a NaN is in the scale, so its code is arbitrary."""
    return numeric.pack_bits(numeric.e2m1_encode(x), 4)
