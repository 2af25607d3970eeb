"""Round to nearest: quantization of a float weight to a QuantTensor, one rule per format, ties to even everywhere.

==============  =====================================================================================================
int, symmetric  scale = bf16(amax / (2**(b-1) - 1)); code = clamp(round(w / scale), -2**(b-1), 2**(b-1) - 1) + 2**(b-1)
int, _zp        lo = min(0, min w), hi = max(0, max w); scale = bf16((hi - lo) / (2**b - 1));
                zero = clamp(round(-lo / scale), 0, 2**b - 1); code = clamp(round(w / scale) + zero, 0, 2**b - 1)
int, _min       lo, hi, scale as for _zp; offset = bf16(-lo); code = clamp(round((w + offset) / scale), 0, 2**b - 1)
fp8             scale = amax / 448 in float32, per tensor (or segment), per row, or per 128 x 128 block
mxfp8, mxfp4    scale = 2**(floor(log2 amax) - 8), respectively - 2 (OCP MX 1.0, 6.3); values beyond saturate
nvfp4           global = amax / (6 * 448); scale = E4M3(amax_group / (6 * global)) clamped to [2**-9, 448];
                code = E2M1(w / (scale * global))  (NVIDIA ModelOpt's rule)
==============  =====================================================================================================

A group of zeros gets scale 1 (E8M0: 2**-127, nvfp4: 2**-9) and codes that mean 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.quant import numeric, sharding
from gristmill.quant.tensor import DENSE_DTYPES, QuantTensor, scales_to_float32

_CHUNK: Final = 1 << 18
"""Weights rounded at a time, which limits temporaries to about 6 MB for any matrix."""
_E4M3_MIN: Final = 2.0**-9
_NVFP4_MIN_GLOBAL: Final = 2.0**-117
"""Keeps scale * global a normal number; affects only weights below 2e-32."""
_WEIGHT_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EMAX: Final = {"mxfp8": 8, "mxfp4": 2}


def quantize(
    weight: Tensor,
    scheme: QuantScheme | str | torch.dtype,
    *,
    g_idx: Tensor | None = None,
    segments: Sequence[int] | None = None,
    global_scale: Tensor | None = None,
) -> QuantTensor:
    """Quantize a weight to a scheme by round to nearest.

    Args:
        weight: float [N, K] or [experts..., N, K], any float dtype; experts are processed one at a time.
        scheme: QuantScheme or name, or for a dense scheme its dtype; the activation part is kept and has no effect here.
        g_idx: int [K], the group of each column (act-order), integer group schemes only.
        segments: first rows of the parts of a fused matrix, (0, ...): each is quantized separately, with its
            own global multiplier and its own 128-blocks.
        global_scale: float32 [1], positive, to use instead of the rule's (nvfp4, fp8; one segment, no experts).

    Raises:
        ValueError: K is not a multiple of the group; NaN or infinity in the weight; a weight on the meta device; bad g_idx or segments.
        TypeError: the weight is not floating point.
    """
    scheme = QuantScheme.parse(scheme)
    _check_weight(weight, scheme)
    weight = weight.detach()  # codes have no gradient
    if g_idx is not None:
        g_idx = _check_g_idx(g_idx, weight, scheme)
    starts = _check_segments(segments, weight.shape[-2])
    if global_scale is not None and (not scheme.has_global or len(starts) > 1 or weight.dim() != 2):
        raise ValueError(
            f"a global scale is given to one [N, K] matrix of nvfp4 or fp8, not to {scheme} {list(weight.shape)}"
        )
    if len(starts) > 1:
        parts = [
            quantize(weight[..., a:b, :], scheme, g_idx=g_idx)
            for a, b in zip(starts, (*starts[1:], weight.shape[-2]), strict=True)
        ]
        return sharding.concat(parts, -2)
    if scheme.is_dense:
        dense = QuantTensor.from_dense(_cast(weight, DENSE_DTYPES[scheme.weight]))
        return QuantTensor(dense.codes, None, dense.shape, scheme)
    shape, lead = tuple(weight.shape), tuple(weight.shape[:-2])
    experts = [_quantize_matrix(w, scheme, g_idx, global_scale) for w in weight.reshape(-1, *shape[-2:])]
    fields = {
        name: torch.stack([e[name] for e in experts]).reshape(*lead, *experts[0][name].shape)
        if lead
        else experts[0][name]
        for name in experts[0]
    }
    scales = fields.get("scales")
    if scales is not None and scheme.scale_dtype == "e4m3":
        scales = scales.view(torch.float8_e4m3fn)
    return QuantTensor(
        fields["codes"], scales, shape, scheme, fields.get("zero"), fields.get("global_scale"), (0,), g_idx
    )


def _quantize_matrix(
    weight: Tensor, scheme: QuantScheme, g_idx: Tensor | None, global_scale: Tensor | None
) -> dict[str, Tensor]:
    """Tensors of one [N, K] matrix, by field; E4M3 scales as bytes."""
    n, k = weight.shape
    shared: dict[str, Tensor] = {}
    if scheme.has_global:
        shared["global_scale"] = _global_scale(weight, scheme) if global_scale is None else global_scale
    step = max(1, _CHUNK // k)
    if scheme.granularity == "block":
        step = cdiv(step, BLOCK) * BLOCK
    fields: dict[str, Tensor] = {}
    for start in range(0, n, step):
        piece = _quantize_rows(weight[start : start + step].to(torch.float32), scheme, g_idx, shared)
        for name, rows in piece.items():
            height = BLOCK if name == "scales" and scheme.granularity == "block" else 1
            if name not in fields:
                fields[name] = rows.new_empty(cdiv(n, height), *rows.shape[1:])
            fields[name][start // height : start // height + rows.shape[0]] = rows
    return fields | shared


def _quantize_rows(
    w: Tensor, scheme: QuantScheme, g_idx: Tensor | None, shared: dict[str, Tensor]
) -> dict[str, Tensor]:
    if scheme.is_integer:
        return _integer_rows(w, scheme, g_idx)
    if scheme.granularity == "tensor":
        return {"codes": numeric.e4m3_encode(w / shared["global_scale"])}
    if scheme.granularity == "channel":
        scales = _fp8_scale(w.abs().amax(1, keepdim=True))
        return {"codes": numeric.e4m3_encode(w / scales), "scales": scales}
    if scheme.granularity == "block":
        return _block_rows(w)
    amax = w.unflatten(1, (-1, scheme.group_size or 1)).abs().amax(2)
    if scheme.weight == "nvfp4":
        top = shared["global_scale"]
        byte = numeric.e4m3_encode((amax / (numeric.E2M1_MAX * top)).clamp(_E4M3_MIN, numeric.E4M3_MAX))
        scales, effective = byte, numeric.e4m3_decode(byte) * top
    else:
        scales = numeric.e8m0_encode(numeric.floor_log2(amax) - _EMAX[scheme.weight])
        effective = scales_to_float32(scales)
    scaled = w / effective.repeat_interleave(scheme.group_size or 1, 1)
    if scheme.bits == 8:
        return {"codes": numeric.e4m3_encode(scaled), "scales": scales}
    return {"codes": numeric.pack_bits(numeric.e2m1_encode(scaled), 4), "scales": scales}


def _integer_rows(w: Tensor, scheme: QuantScheme, g_idx: Tensor | None) -> dict[str, Tensor]:
    n, k = w.shape
    groups = scheme.groups(k)
    column = (
        torch.arange(k, device=w.device) // (scheme.group_size or k)
        if g_idx is None
        else g_idx.to(torch.int64)
    )

    def reduce(values: Tensor, reduction: str) -> Tensor:
        """[N, groups] amax or amin, together with 0."""
        start = torch.zeros(n, groups, device=w.device, dtype=torch.float32)
        return start.scatter_reduce(1, column.expand(n, k), values, reduction, include_self=True)

    top = (1 << scheme.bits) - 1
    if scheme.zero_points:
        low, high = reduce(w, "amin"), reduce(w, "amax")
        scales = _bf16_scale(numeric.divide(high, top) - numeric.divide(low, top))
        zero = (-low / scales.float()).round().clamp(0, top)
        codes = ((w / scales.float()[:, column]).round() + zero[:, column]).clamp(0, top)
        fields = {"scales": scales, "zero": zero.to(torch.uint8)}
    elif scheme.minimums:
        low, high = reduce(w, "amin"), reduce(w, "amax")
        offset = (-low).to(torch.bfloat16)
        scales = _bf16_scale(numeric.divide(high, top) - numeric.divide(low, top))
        codes = ((w + offset.float()[:, column]) / scales.float()[:, column]).round().clamp(0, top)
        fields = {"scales": scales, "zero": offset}
    else:
        half = 1 << (scheme.bits - 1)
        scales = _bf16_scale(numeric.divide(reduce(w.abs(), "amax"), max(1, half - 1)))
        codes = (w / scales.float()[:, column]).round().clamp(-half, half - 1) + half
        fields = {"scales": scales}
    return {"codes": numeric.pack_bits(codes.to(torch.uint8), scheme.bits), **fields}


def _block_rows(w: Tensor) -> dict[str, Tensor]:
    n, k = w.shape
    padded = torch.nn.functional.pad(w, (0, -k % BLOCK, 0, -n % BLOCK))
    tiles = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = _fp8_scale(tiles.abs().amax((1, 3)))
    codes = numeric.e4m3_encode(tiles / scales[:, None, :, None]).view(padded.shape)
    return {"codes": codes[:n, :k].contiguous(), "scales": scales}


def _fp8_scale(amax: Tensor) -> Tensor:
    """amax / 448 in float32, 1 if that is 0."""
    scale = numeric.divide(amax, numeric.E4M3_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _bf16_scale(scale: Tensor) -> Tensor:
    rounded = scale.to(torch.bfloat16)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def _global_scale(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """float32 [1]: the multiplier of a whole matrix."""
    low, high = weight.aminmax()  # exact in the weight's own dtype
    amax = torch.maximum(-low, high).to(torch.float32).view(1)
    if scheme.weight != "nvfp4":
        return _fp8_scale(amax)
    top = numeric.divide(amax, numeric.E2M1_MAX * numeric.E4M3_MAX)
    return torch.where(amax > 0, top.clamp(min=_NVFP4_MIN_GLOBAL), torch.ones_like(top))


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    cast = weight.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        raise ValueError(
            f"weight {list(weight.shape)} has values beyond the range of {dtype}: largest {float(weight.abs().amax())}"
        )
    return cast


def _check_weight(weight: Tensor, scheme: QuantScheme) -> None:
    if weight.dtype not in _WEIGHT_DTYPES:
        raise TypeError(f"quantize takes a float64, float32, float16 or bfloat16 weight, got {weight.dtype}")
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(f"quantize takes a weight [..., N, K], none of them 0, got {list(weight.shape)}")
    if weight.is_meta:
        raise ValueError(
            f"quantize reads the weight's values, and this one {list(weight.shape)} is on the meta device: load it first"
        )
    multiple = scheme.requires_k_multiple
    if weight.shape[-1] % multiple:
        raise ValueError(
            f"{scheme} has groups of {multiple} along K, and K = {weight.shape[-1]} of the weight "
            f"{list(weight.shape)} is not a multiple of {multiple}"
        )
    for index, matrix in enumerate(weight.reshape(-1, *weight.shape[-2:])):
        if all(_is_finite(rows) for rows in matrix.split(max(1, _CHUNK // matrix.shape[1]))):
            continue
        bad = ~torch.isfinite(matrix.to(torch.float32))
        if bool(bad.any()):
            n, k = (int(i) for i in bad.nonzero()[0])
            where = f"[{n}, {k}]" if weight.dim() == 2 else f"expert {index}, [{n}, {k}]"
            raise ValueError(
                f"weight {list(weight.shape)} has {int(bad.sum())} values that are NaN or infinite in float32, "
                f"the first at {where}: cannot quantize to {scheme}"
            )


def _is_finite(rows: Tensor) -> bool:
    """Whether every value is finite in float32; float64 beyond it becomes infinite."""
    low, high = (float(v.to(torch.float32)) for v in rows.aminmax())
    return math.isfinite(low) and math.isfinite(high)


def _check_g_idx(g_idx: Tensor, weight: Tensor, scheme: QuantScheme) -> Tensor:
    k = weight.shape[-1]
    if not scheme.is_integer or scheme.granularity != "group":
        raise ValueError(
            f"g_idx orders the groups of integer group schemes such as int4_g128, not of {scheme}"
        )
    if g_idx.is_floating_point() or list(g_idx.shape) != [k]:
        raise ValueError(f"g_idx is an integer tensor [{k}], got {g_idx.dtype} {list(g_idx.shape)}")
    groups = scheme.groups(k)
    low, high = (int(v) for v in g_idx.aminmax())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx has values 0..{groups - 1} for K = {k} and {scheme}, got {low}..{high}")
    return g_idx.to(device=weight.device, dtype=torch.int32)


def _check_segments(segments: Sequence[int] | None, n: int) -> tuple[int, ...]:
    starts = (0,) if segments is None else tuple(int(s) for s in segments)
    ordered = all(a < b for a, b in pairwise(starts))
    if not starts or starts[0] != 0 or not ordered or starts[-1] >= n:
        raise ValueError(f"segments are increasing first rows below N = {n}, starting with 0, got {starts}")
    return starts
