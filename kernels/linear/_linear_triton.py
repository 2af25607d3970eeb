"""Linear in Triton: one tile of the output a program, codes decoded by integer arithmetic on every vendor.

Codes go into the product exactly (bf16 and float16 hold every code of 8 bits or fewer), each step's sum is scaled in
float32, so float32 scales are never rounded. e4m3 and e2m1 are decoded through float16's subnormals: no hardware fp8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.common import row_stride
from gristmill.kernels.linear.linear_triton import config

if TYPE_CHECKING:
    from torch import Tensor

DENSE, INT4, E2M1, INT8, E4M3 = range(5)
FORMATS = {"int4": INT4, "mxfp4": E2M1, "nvfp4": E2M1, "int8": INT8, "fp8": E4M3, "mxfp8": E4M3}
SCALE_FLOAT, SCALE_E8M0, SCALE_E4M3 = range(1, 4)


@triton.jit
def e4m3_to_half(byte):
    bits = ((byte.to(tl.int16) & 0x80) << 8) | ((byte.to(tl.int16) & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e2m1_to_half(code):
    bits = ((code.to(tl.int16) & 8) << 12) | ((code.to(tl.int16) & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0


@triton.jit
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
    """Values of codes [BN, BK] from column k0 on, in `dtype`; whatever lies past the end meets x = 0 there.

    From float16 by way of float32: Triton's direct step to bf16 needs an instruction that is not there before sm_80.
    """
    if FORMAT == 1 or FORMAT == 2:
        at = k0 // 2 + tl.arange(0, BK // 2)
        byte = tl.load(
            weight + row_offsets[:, None] + at[None, :],
            mask=row_mask[:, None] & (at < row_bytes)[None, :],
            other=0,
        )
        code = tl.interleave(byte & 15, byte >> 4)
        if FORMAT == 1:
            return (code.to(tl.int32) - ZERO).to(dtype)
        return e2m1_to_half(code).to(tl.float32).to(dtype)
    at = k0 + tl.arange(0, BK)
    inside = row_mask[:, None] & (at < columns)[None, :]
    value = tl.load(weight + row_offsets[:, None] + at[None, :], mask=inside, other=0)
    if FORMAT == 3:
        return (value.to(tl.int32) - ZERO).to(dtype)
    if FORMAT == 4:
        return e4m3_to_half(value).to(tl.float32).to(dtype)
    return value.to(dtype)


@triton.jit
def load_scale(scales, offsets, mask, SCALE: tl.constexpr):
    raw = tl.load(scales + offsets, mask=mask, other=0)
    if SCALE == 2:
        exponent = raw.to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    if SCALE == 3:
        return e4m3_to_half(raw).to(tl.float32)
    return raw.to(tl.float32)


@triton.jit
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


@triton.jit
def linear_kernel(
    x,
    weight,
    scales,
    zeros,
    row_scale,
    row_block,
    perm,
    bias,
    residual,
    out,
    m,
    n,
    k,
    columns,
    x_stride,
    row_bytes,
    groups,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PERM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """n: columns of the output; with SILU the weight has 2 n rows, gate first. FP32: multiply in float32."""
    dtype: tl.constexpr = tl.float32 if FP32 else x.dtype.element_ty
    ns = tl.program_id(0) * BN + tl.arange(0, BN)
    n_mask = ns < n
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    row_mask = rows < m
    y = product(
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
        dtype,
        FORMAT,
        SCALE,
        GROUP,
        ZERO,
        HAS_ZERO,
        ROW_SCALE,
        ROW_BLOCK,
        PERM,
        PRECISION,
        BM,
        BN,
        BK,
    )
    if BIAS:
        y += tl.load(bias + ns, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if SILU:
        up = product(
            x,
            weight,
            scales,
            zeros,
            row_scale,
            row_block,
            perm,
            rows,
            row_mask,
            ns + n,
            n_mask,
            k,
            columns,
            x_stride,
            row_bytes,
            groups,
            dtype,
            FORMAT,
            SCALE,
            GROUP,
            ZERO,
            HAS_ZERO,
            ROW_SCALE,
            ROW_BLOCK,
            PERM,
            PRECISION,
            BM,
            BN,
            BK,
        )
        if BIAS:
            up += tl.load(bias + ns + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        y = y / (1.0 + tl.exp(-y)) * up
    at = rows[:, None] * n + ns[None, :]
    inside = row_mask[:, None] & n_mask[None, :]
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def launch(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    n: int,
    workspace: Tensor | None,
    out: Tensor,
) -> None:
    """x [..., K], one dense tensor or the six tensors of plain_v1 -> out [..., N or N / 2]."""
    k, columns_out = x.shape[-1], out.shape[-1]
    m = x.numel() // k
    if m == 0:
        return
    tensors, sizes, constants = weight_arguments(config, x, weight)
    grid = (triton.cdiv(columns_out, int(config["bn"])), triton.cdiv(m, int(config["bm"])))
    linear_kernel[grid](
        x,
        *tensors,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        m,
        columns_out,
        k,
        *sizes,
        **constants,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SILU=silu_mul,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def weight_arguments(
    config: Config, x: Tensor, weight: list[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """What a kernel is given of a weight: its six tensors; (columns, stride of x, bytes of a row, groups); constants."""
    import torch

    k = x.shape[-1]
    scheme = QuantScheme.parse(str(config["scheme"]))
    if scheme.is_dense:
        codes = scales = zeros = row_scale = row_block = perm = weight[0]
        flags: tuple[bool, ...] = (False,) * 4
        kind, code, columns, groups = DENSE, 0, k, 1
    else:
        codes, scales, zeros, row_scale, row_block, perm = weight
        flags = tuple(t.numel() > 0 for t in (zeros, row_scale, row_block, perm))
        kind, columns, groups = FORMATS[scheme.weight], perm.numel() or k, scales.shape[-1]
        code = {"e8m0": SCALE_E8M0, "e4m3": SCALE_E4M3}.get(str(scheme.scale_dtype), SCALE_FLOAT)
        scales = scales.view(torch.uint8) if code == SCALE_E4M3 else scales
    in_fp32 = x.dtype == torch.float32 or (scheme.is_dense and codes.dtype != x.dtype)
    constants = {
        "FORMAT": kind,
        "SCALE": code,
        "GROUP": scheme.group_size or 0,
        "ZERO": 0 if flags[0] else scheme.implicit_zero,
        "HAS_ZERO": flags[0],
        "ROW_SCALE": flags[1],
        "ROW_BLOCK": flags[2],
        "PERM": flags[3],
        "FP32": in_fp32,
        "PRECISION": "ieee",
        "BM": config["bm"],
        "BN": config["bn"],
        "BK": config["bk"],
    }
    return (
        (codes, scales, zeros, row_scale, row_block, perm),
        (columns, row_stride(x), codes.shape[-1], groups),
        constants,
    )


def aot_dense(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the dense kernel."""
    return [case for case in aot(target) if case.name.startswith("dense")]


def aot_quantized(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the weight-only kernel."""
    return [case for case in aot(target) if not case.name.startswith("dense")]


def aot(target: Target) -> list[AotCase]:
    """Dense, and one scheme of every code and scale format, with the tiles that the default configuration has for them."""
    ints = dict.fromkeys(("m", "n", "k", "columns", "x_stride", "row_bytes", "groups"), "i32")
    plain = {"scales": "*bf16", "zeros": "*u8", "row_scale": "*fp32", "row_block": "*i32", "perm": "*i32"}
    off = dict.fromkeys(
        ("HAS_ZERO", "ROW_SCALE", "ROW_BLOCK", "PERM", "BIAS", "RESIDUAL", "SILU", "FP32"), False
    )
    op, cases = default_registry().op("linear"), []

    def case(name: str, problem: str, weight: str, types: dict[str, str], **constants: Any) -> None:
        described = op.problem(f"n=4096,k=4096,{problem}")
        chosen, x = config(described, target), f"*{described.text('x')}"
        pointers = {"x": x, "weight": weight, **plain, **types, "bias": x, "residual": x, "out": x}
        shape = {name.upper(): chosen[name] for name in ("bm", "bn", "bk")}
        base = (
            {"FORMAT": DENSE, "SCALE": 0, "GROUP": 0, "ZERO": 0, "PRECISION": "ieee"}
            | off
            | constants
            | shape
        )
        cases.append(
            AotCase(
                name,
                linear_kernel,
                pointers | ints,
                base,
                {"num_warps": int(chosen["warps"]), "num_stages": int(chosen["stages"])},
                ("k", "columns", "x_stride", "row_bytes"),
                () if base["FP32"] else matrix_product(target, int(chosen["bm"])),
            )
        )

    case("dense_bf16", "m=1024,x=bf16", "*bf16", {})
    case("dense_fp32", "m=32,x=fp32,w=fp32", "*fp32", {}, FP32=True)
    case(
        "int4_g128",
        "m=16,x=bf16,w=int4_g128",
        "*u8",
        {},
        FORMAT=INT4,
        SCALE=SCALE_FLOAT,
        GROUP=128,
        ZERO=8,
        BIAS=True,
    )
    case(
        "int4_g32_zp_act_order",
        "m=512,x=fp16,w=int4_g32_zp",
        "*u8",
        {"scales": "*fp16"},
        FORMAT=INT4,
        SCALE=SCALE_FLOAT,
        GROUP=32,
        HAS_ZERO=True,
        PERM=True,
    )
    case(
        "int8_ch_silu",
        "m=16,x=bf16,w=int8_ch",
        "*u8",
        {},
        FORMAT=INT8,
        SCALE=SCALE_FLOAT,
        ZERO=128,
        SILU=True,
    )
    case(
        "fp8_block",
        "m=512,x=bf16,w=fp8_block",
        "*u8",
        {"scales": "*fp32"},
        FORMAT=E4M3,
        SCALE=SCALE_FLOAT,
        GROUP=128,
        ROW_BLOCK=True,
        RESIDUAL=True,
    )
    case("mxfp4", "m=16,x=bf16,w=mxfp4", "*u8", {"scales": "*u8"}, FORMAT=E2M1, SCALE=SCALE_E8M0, GROUP=32)
    case(
        "nvfp4",
        "m=16,x=bf16,w=nvfp4",
        "*u8",
        {"scales": "*u8"},
        FORMAT=E2M1,
        SCALE=SCALE_E4M3,
        GROUP=16,
        ROW_SCALE=True,
    )
    return cases
