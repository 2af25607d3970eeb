"""A second implementation of round to nearest and dequantization, in numpy with ml_dtypes, one group after
the other."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import QuantTensor, quantize

QUANTIZED = tuple(name for name in ALL_WEIGHT_SCHEMES if not QuantScheme.parse(name).is_dense)
F32 = np.float32


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32)


def e2m1(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(F32)


def bf16(x: float) -> np.float32:
    return F32(F32(x).astype(ml_dtypes.bfloat16))


def integer(v: np.ndarray, bits: int, zero_points: bool) -> np.ndarray:
    if zero_points:
        low, high, top = min(F32(0), v.min()), max(F32(0), v.max()), F32(2**bits - 1)
        scale = bf16(high / top - low / top) or F32(1)
        zero = np.clip(np.rint(-low / scale), 0, top)
        return (np.clip(np.rint(v / scale) + zero, 0, top) - zero) * scale
    half = 2 ** (bits - 1)
    scale = bf16(np.abs(v).max() / F32(half - 1)) or F32(1)
    return np.clip(np.rint(v / scale), -half, half - 1).astype(F32) * scale


def fp8(v: np.ndarray) -> np.ndarray:
    scale = np.abs(v).max() / F32(448) or F32(1)
    return e4m3(v / scale) * scale


def mx(v: np.ndarray, emax: int, element) -> np.ndarray:
    amax = float(np.abs(v).max())
    # math.log2 rounds; frexp is exact
    exponent = -127 if amax == 0 else max(-127, int(np.frexp(amax)[1]) - 1 - emax)
    scale = F32(np.ldexp(1.0, exponent))
    return element(v / scale) * scale


def nvfp4(v: np.ndarray, top: np.float32) -> np.ndarray:
    scale = e4m3(np.clip(np.abs(v).max() / (F32(6) * top), F32(2**-9), F32(448)))
    return (e2m1(v / (scale * top)) * scale) * top


def round_trip(w: np.ndarray, name: str) -> np.ndarray:
    """Returns float32 [N, K] weights as quantized and dequantized under a scheme."""
    scheme = QuantScheme.parse(name)
    w = w.astype(F32)
    out = np.empty_like(w)
    n, k = w.shape
    if scheme.granularity == "tensor":
        return fp8(w)
    if scheme.granularity == "block":
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                out[i : i + 128, j : j + 128] = fp8(w[i : i + 128, j : j + 128])
        return out
    size = scheme.group_size or k
    top = np.abs(w).max() / F32(6 * 448) or F32(1)
    for i in range(n):
        for j in range(0, k, size):
            v = w[i, j : j + size]
            if scheme.is_integer:
                out[i, j : j + size] = integer(v, scheme.bits, scheme.zero_points)
            elif name == "nvfp4":
                out[i, j : j + size] = nvfp4(v, top)
            elif name == "fp8_ch":
                out[i, j : j + size] = fp8(v)
            else:
                out[i, j : j + size] = mx(v, 8, e4m3) if name == "mxfp8" else mx(v, 2, e2m1)
    return out


def weight(n: int, k: int, seed: int = 0, lead: tuple[int, ...] = ()) -> torch.Tensor:
    """Returns normal values with outliers, a row of zeros, and scales that differ by row and column."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*lead, n, k, generator=generator)
    w *= torch.rand(n, 1, generator=generator) * 3 + 0.05
    w *= torch.exp2(torch.randint(-6, 4, (k,), generator=generator).float())
    w[..., n // 2, :] = 0
    return w


def act_order(scheme: str | QuantScheme, k: int, seed: int = 0) -> torch.Tensor:
    """Returns a shuffled g_idx with groups of the right size."""
    size = QuantScheme.parse(scheme).group_size or 1
    return (torch.arange(k) // size)[torch.randperm(k, generator=torch.Generator().manual_seed(seed))].to(
        torch.int32
    )


def variants(name: str, n: int = 37, k: int = 256) -> list[QuantTensor]:
    """Yields QuantTensors of one scheme in every form: experts, segments, act-order, cut groups and blocks."""
    scheme = QuantScheme.parse(name)
    quantized = [
        quantize(weight(n, k), name),
        quantize(weight(n, k, 1), name).narrow(1, 9, k - 57),
        quantize(weight(300, k, 2), name).narrow(0, 9, 211),
        quantize(weight(n, k, 3, (3,)), name),
        quantize(weight(n, k, 4, (3,)), name).narrow(2, 5, k - 48),
        quantize(weight(300, k, 5), name, segments=(0, 130, 200)),
        quantize(weight(1, k, 6), name),
    ]
    if scheme.requires_k_multiple == 1:
        quantized.append(quantize(weight(n, 137, 7), name))
    if scheme.is_integer and scheme.granularity == "group":
        g_idx = act_order(scheme, k)
        quantized.append(quantize(weight(n, k, 8), name, g_idx=g_idx))
        quantized.append(quantize(weight(n, k, 9), name, g_idx=g_idx).narrow(1, 9, k - 57))
        quantized.append(quantize(weight(n, k, 10, (2,)), name, g_idx=g_idx))
    return quantized
