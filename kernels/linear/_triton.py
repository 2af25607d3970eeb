"""The tile product of the linear kernels in Triton, on every vendor: codes decoded by integer arithmetic.

Codes enter the product exactly (bf16 and float16 represent every code of 8 bits or fewer), and the sum of each step is scaled
in float32, so float32 scales are never rounded. e4m3 and e2m1 are decoded through float16's subnormals: no hardware fp8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.common import row_stride
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from torch import Tensor

DENSE, INT4, E2M1, INT8, E4M3 = range(5)
FORMATS = {"int4": INT4, "mxfp4": E2M1, "nvfp4": E2M1, "int8": INT8, "fp8": E4M3, "mxfp8": E4M3}
SCALE_FLOAT, SCALE_E8M0, SCALE_E4M3 = range(1, 4)
SCALES = {"e8m0": SCALE_E8M0, "e4m3": SCALE_E4M3}


@jit
def e4m3_to_half(byte):
    bits = ((byte.to(tl.int16) & 0x80) << 8) | ((byte.to(tl.int16) & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@jit
def e2m1_to_half(code):
    bits = ((code.to(tl.int16) & 8) << 12) | ((code.to(tl.int16) & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0


@jit
def load_codes(
    weight,
    row_offsets,
    row_mask,
    k0,
    columns,
    row_bytes,
    dtype: tl.constexpr,
    FORMAT: tl.constexpr,
    ZERO: tl.constexpr,
    BK: tl.constexpr,
):
    """Values of codes [BN, BK] from column k0 on, in `dtype`; codes past the end are multiplied by x = 0.

    Converted from float16 through float32: Triton's direct conversion to bf16 needs an instruction of sm_80.
    """
    if FORMAT == 1 or FORMAT == 2:
        column = k0 // 2 + tl.arange(0, BK // 2)
        byte = tl.load(
            weight + row_offsets[:, None] + column[None, :],
            mask=row_mask[:, None] & (column < row_bytes)[None, :],
            other=0,
        )
        code = tl.interleave(byte & 15, byte >> 4)
        if FORMAT == 1:
            return (code.to(tl.int32) - ZERO).to(dtype)
        return e2m1_to_half(code).to(tl.float32).to(dtype)
    column = k0 + tl.arange(0, BK)
    inside = row_mask[:, None] & (column < columns)[None, :]
    value = tl.load(weight + row_offsets[:, None] + column[None, :], mask=inside, other=0)
    if FORMAT == 3:
        return (value.to(tl.int32) - ZERO).to(dtype)
    if FORMAT == 4:
        return e4m3_to_half(value).to(tl.float32).to(dtype)
    return value.to(dtype)


@jit
def load_scale(scales, offsets, mask, SCALE: tl.constexpr):
    raw = tl.load(scales + offsets, mask=mask, other=0)
    if SCALE == 2:
        exponent = raw.to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    if SCALE == 3:
        return e4m3_to_half(raw).to(tl.float32)
    return raw.to(tl.float32)


@jit
def product(
    x,
    weight,
    scales,
    zeros,
    row_scale,
    row_block,
    perm,
    rows,
    row_mask,
    ns,
    n_mask,
    k,
    columns,
    x_stride,
    row_bytes,
    groups,
    dtype: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PERM: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    first=0,
):
    """float32 [BM, BN]: rows of x times rows `ns` of the weight, scaled; of the weight's columns from `first`, a multiple of BK, to
    `columns`."""
    total = tl.zeros([BM, BN], dtype=tl.float32)
    offsets = ns.to(tl.int64) * row_bytes
    scale_rows = ns.to(tl.int64)
    if ROW_BLOCK:
        scale_rows = tl.load(row_block + ns, mask=n_mask, other=0).to(tl.int64)
    scale_rows = scale_rows * groups
    sums = tl.zeros([BM], dtype=tl.float32)
    for k0 in range(first, columns, BK):
        ks = k0 + tl.arange(0, BK)
        source = ks
        inside = ks < columns
        if PERM:
            source = tl.load(perm + ks, mask=inside, other=-1)
            inside = source >= 0
        else:
            inside = ks < k
        a = tl.load(
            x + rows[:, None] * x_stride + source[None, :],
            mask=row_mask[:, None] & inside[None, :],
            other=0.0,
        )
        a = a.to(dtype)
        w = load_codes(weight, offsets, n_mask, k0, columns, row_bytes, dtype, FORMAT, ZERO, BK)
        if GROUP == 0:
            total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
            if HAS_ZERO:
                sums += tl.sum(a.to(tl.float32), 1)
        elif GROUP == 16:
            # A step covers several groups, so the scale goes into the weight: e2m1 times e4m3 has at most six
            # significant bits, which bf16 and float16 hold exactly.
            groups_at = k0 // 16 + tl.arange(0, BK // 16)
            scale = load_scale(
                scales,
                scale_rows[:, None] + groups_at[None, :],
                n_mask[:, None] & (groups_at < groups)[None, :],
                SCALE,
            )
            scaled = tl.reshape(w.to(tl.float32), (BN, BK // 16, 16)) * scale[:, :, None]
            total = tl.dot(
                a, tl.trans(tl.reshape(scaled, (BN, BK)).to(dtype)), total, input_precision=PRECISION
            )
        else:
            part = tl.dot(a, tl.trans(w), input_precision=PRECISION)
            at = scale_rows + k0 // GROUP
            if HAS_ZERO:
                zero = tl.load(zeros + at, mask=n_mask, other=0).to(tl.float32)
                part -= tl.sum(a.to(tl.float32), 1)[:, None] * zero[None, :]
            total += part * load_scale(scales, at, n_mask, SCALE)[None, :]
    if GROUP == 0 and HAS_ZERO:
        total -= sums[:, None] * tl.load(zeros + scale_rows, mask=n_mask, other=0).to(tl.float32)[None, :]
    if GROUP == 0 and SCALE != 0:
        total *= load_scale(scales, scale_rows, n_mask, SCALE)[None, :]
    if ROW_SCALE:
        total *= tl.load(row_scale + ns, mask=n_mask, other=0.0)[None, :]
    return total


def weight_arguments(
    config: Config, x: Tensor, weight: list[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Kernel arguments for a weight: its six tensors; (columns, stride of x, bytes of a row, groups); constants."""
    import torch

    scheme = QuantScheme.parse(str(config["scheme"]))
    if scheme.is_dense:
        codes = scales = zeros = row_scale = row_block = perm = weight[0]
        columns, groups = x.shape[-1], 1
        constants = scheme_constants(scheme)
    else:
        codes, scales, zeros, row_scale, row_block, perm = weight
        columns, groups = perm.numel() or x.shape[-1], scales.shape[-1]
        constants = scheme_constants(
            scheme,
            HAS_ZERO=zeros.numel() > 0,
            ROW_SCALE=row_scale.numel() > 0,
            ROW_BLOCK=row_block.numel() > 0,
            PERM=perm.numel() > 0,
        )
        scales = scales.view(torch.uint8) if constants["SCALE"] == SCALE_E4M3 else scales
    return (
        (codes, scales, zeros, row_scale, row_block, perm),
        (columns, row_stride(x), codes.shape[-1], groups),
        constants
        | {
            "FP32": x.dtype == torch.float32 or (scheme.is_dense and codes.dtype != x.dtype),
            "BM": config["bm"],
            "BN": config["bn"],
            "BK": config["bk"],
        },
    )


def scheme_constants(scheme: QuantScheme, **given: bool) -> dict[str, Any]:
    """The constants of `product` that a scheme fixes; given: which of HAS_ZERO, ROW_SCALE, ROW_BLOCK and PERM are on."""
    has_zero = given.get("HAS_ZERO", False)
    return {
        "FORMAT": DENSE if scheme.is_dense else FORMATS[scheme.weight],
        "SCALE": 0 if scheme.is_dense else SCALES.get(str(scheme.scale_dtype), SCALE_FLOAT),
        "GROUP": scheme.group_size or 0,
        "ZERO": 0 if has_zero else scheme.implicit_zero,
        **dict.fromkeys(("HAS_ZERO", "ROW_SCALE", "ROW_BLOCK", "PERM"), False),
        **given,
        "PRECISION": "ieee",
    }


def weight_case(problem: Problem, tile: Config, **given: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Arguments of a compilation for the weight of `problem` and a tile: types of its tensors, and constants.

    given: as for `scheme_constants`.
    """
    scheme, x = QuantScheme.parse(problem.text("w")), f"*{problem.text('x')}"
    constants = scheme_constants(scheme, **given)
    types = {
        "weight": f"*{scheme.name}" if scheme.is_dense else "*u8",
        "scales": {"e8m0": "*u8", "e4m3": "*u8", "fp32": "*fp32"}.get(str(scheme.scale_dtype), x),
        "zeros": "*u8",
        "row_scale": "*fp32",
        "row_block": "*i32",
        "perm": "*i32",
    }
    sizes = {name.upper(): tile[name] for name in ("bm", "bn", "bk")}
    return types, constants | sizes | {"FP32": x == "*fp32"}
