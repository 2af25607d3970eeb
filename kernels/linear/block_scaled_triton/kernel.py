"""Linear over block-scaled codes in Triton: linear_mx_triton, linear_nvfp4_triton.

Both operands are codes with a scale for every 16 or 32 columns, as `tl.dot_scaled` takes them: tensor cores multiply them as they are, tcgen05 of
data-centre Blackwell, mma.sync of GeForce Blackwell, v_mfma_scale of gfx950. Only MXFP4 by MXFP8 is decoded to bf16 on GeForce Blackwell, exactly.
x is quantized in launches before (`quantize.py`), the factor of NVFP4 that of all rows of x.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import need_workspace
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.linear._plain_blocks import need_blocks
from gristmill.kernels.linear.block_scaled_triton._product import block_scaled_product
from gristmill.kernels.linear.block_scaled_triton.quantize import (
    OPERANDS,
    PARTS,
    aot_case,
    maxima_case,
    quantize,
)

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

ALIGNMENT = 256


MX, NVFP4 = ("mxfp8.mxfp8", "mxfp4.mxfp8", "mxfp4.mxfp4"), ("nvfp4.nvfp4",)
MIXED = "mxfp4.mxfp8"
"""The scheme whose operands have codes of different widths."""
FEATURES = {
    "mx": (frozenset({"mma.block_scale", "mma.mxf8", "mma.mxf4"}), frozenset({"mfma.mxf8", "mfma.mxf4"})),
    "nvfp4": (frozenset({"mma.block_scale", "mma.nvf4"}),),
}
"""Kernel -> what the hardware must have, in alternatives."""


def schemes_of(name: str) -> tuple[str, ...]:
    """The schemes of a kernel of `FEATURES`."""
    return MX if name == "mx" else NVFP4


def _refusal(schemes: tuple[str, ...], problem: Problem) -> str | None:
    """Why a problem is refused; None if it is not."""
    scheme = QuantScheme.parse(problem.text("w"))
    if str(scheme) not in schemes:
        return f"multiplies {', '.join(schemes)}, not {scheme}"
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    group = OPERANDS[str(scheme.activation)].group
    if problem.integer("k") % group:
        return f"needs K a multiple of {group}, the columns of a scale, got K={problem.integer('k')}"
    return None


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as M needs; tcgen05 multiplies 128 rows."""
    m, scheme = problem.integer("m"), str(QuantScheme.parse(problem.text("w")))
    rows = 128 if "tcgen05" in target.features or m > 64 else 64 if m > 32 else 32 if m > 16 else 16
    return {"scheme": scheme, **tile(scheme, rows, m > 16, target)}


def tile(scheme: str, rows: int, wide: bool, target: Target) -> dict[str, ConfigValue]:
    """A tile of so many rows of x. Operands that are decoded take registers of a quarter of the columns."""
    decoded = scheme == MIXED and "mma.sync.block_scale" in target.features
    columns = 32 if decoded else 128 if wide else 64
    return {"bm": rows, "bn": columns, "bk": 128, "warps": 8 if rows == 128 else 4, "stages": 3}


def workspace(problem: Problem, config: Config) -> Workspace:
    """Codes and scales of x; of NVFP4, its factor and the maxima that it comes from."""
    m, k = problem.integers(*"mk")
    return Workspace(sum(_sizes(str(config["scheme"]), m, k)))


def _sizes(scheme: str, m: int, k: int) -> tuple[int, int, int]:
    """Bytes of codes, of scales, and of factor and maxima."""
    of_x = OPERANDS[scheme.partition(".")[2]]
    sizes = (m * k // of_x.packed, m * (k // of_x.group), 0 if of_x.emax else 4 * (1 + PARTS))
    codes, scales, rest = (cdiv(size, ALIGNMENT) * ALIGNMENT for size in sizes)
    return codes, scales, rest


@jit
def block_scaled_kernel(
    x,
    x_scales,
    weight,
    w_scales,
    factor,
    row_scale,
    bias,
    residual,
    out,
    m,
    n,
    k,
    X: tl.constexpr,
    W: tl.constexpr,
    X_PACKED: tl.constexpr,
    W_PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    NVFP4: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """n: columns of the output; with SILU the weight has 2 n rows, gate first. X, W: formats of `tl.dot_scaled`."""
    ns = tl.program_id(0) * BN + tl.arange(0, BN)
    n_mask = ns < n
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    row_mask = rows < m
    for half in tl.static_range(2 if SILU else 1):  # gate, then up
        z = block_scaled_product(
            x,
            x_scales,
            weight,
            w_scales,
            rows,
            row_mask,
            (ns + half * n).to(tl.int64),
            n_mask,
            k,
            X,
            W,
            X_PACKED,
            W_PACKED,
            GROUP,
            NVFP4,
            BM,
            BN,
            BK,
        )
        if NVFP4:
            z *= tl.load(row_scale + ns + half * n, mask=n_mask, other=0.0)[None, :] * tl.load(factor)
        if BIAS:
            z += tl.load(bias + ns + half * n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if half == 0:
            y = z
        else:
            y = y / (1.0 + tl.exp(-y)) * z
    to = rows[:, None] * n + ns[None, :]
    written = row_mask[:, None] & n_mask[None, :]
    if RESIDUAL:
        y += tl.load(residual + to, mask=written, other=0.0).to(tl.float32)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=written)


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], the six tensors of plain_v1 -> out [..., N or N / 2].

    Raises:
        ValueError: tensors that are not those of a weight in the format, in the order of x's columns; a workspace that is too small.
    """
    import torch

    codes, scales, _, row_scale, _, _ = call.weight
    scheme, k, columns = QuantScheme.parse(str(config["scheme"])), call.x.shape[-1], call.out.shape[-1]
    rows, m = columns * (2 if call.silu_mul else 1), call.x.numel() // k
    need_blocks(f"linear of {scheme}", scheme, call.weight, (rows,), k)
    if m == 0:
        return
    sizes = _sizes(str(scheme), m, k)
    space = call.workspace
    if space is None:
        space = torch.empty(sum(sizes), dtype=torch.uint8, device=call.x.device)
    else:
        need_workspace("linear", space, sum(sizes), call.x.device)
    x_codes, x_scales = space[: sizes[0]], space[sizes[0] : sizes[0] + sizes[1]]
    factor = space[sizes[0] + sizes[1] : sum(sizes)].view(torch.float32)
    quantize(OPERANDS[str(scheme.activation)], call.x, m, k, x_codes, x_scales, factor)
    grid = (cdiv(columns, int(config["bn"])), cdiv(m, int(config["bm"])))
    block_scaled_kernel[grid](
        x_codes,
        x_scales,
        codes,
        scales.view(torch.uint8),
        factor,
        row_scale,
        call.x if call.bias is None else call.bias,
        call.x if call.residual is None else call.residual,
        call.out,
        m,
        columns,
        k,
        **constants(scheme),
        BIAS=call.bias is not None,
        RESIDUAL=call.residual is not None,
        SILU=call.silu_mul,
        BM=config["bm"],
        BN=config["bn"],
        BK=config["bk"],
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def constants(scheme: QuantScheme) -> dict[str, str | int | bool]:
    """What the product of a scheme is compiled for."""
    of_w, of_x = OPERANDS[scheme.weights], OPERANDS[str(scheme.activation)]
    return {
        "X": of_x.name,
        "W": of_w.name,
        "X_PACKED": of_x.packed,
        "W_PACKED": of_w.packed,
        "GROUP": of_w.group,
        "NVFP4": not of_w.emax,
    }


def aot_mx(target: Target) -> list[AotCase]:
    """Every scheme of `MX`, and the quantizers of x."""
    return [*_products(MX, target), *_quantizers(("mxfp8", "mxfp4"), target)]


def aot_nvfp4(target: Target) -> list[AotCase]:
    """NVFP4, and its quantizer of x."""
    return [*_products(NVFP4, target), *_quantizers(("nvfp4",), target), maxima_case()]


def _products(schemes: tuple[str, ...], target: Target) -> Iterator[AotCase]:
    rows = 128 if "tcgen05" in target.features else 64
    pointers = dict.fromkeys(("x", "x_scales", "weight", "w_scales"), "*u8") | {"factor": "*fp32"}
    pointers |= {"row_scale": "*fp32"} | dict.fromkeys(("bias", "residual", "out"), "*bf16")
    for scheme in schemes:
        shape = tile(scheme, rows, True, target)
        sizes = {name.upper(): shape[name] for name in ("bm", "bn", "bk")}
        switches = {"BIAS": True, "RESIDUAL": False, "SILU": scheme == MIXED}
        yield AotCase(
            scheme.replace(".", "_"),
            block_scaled_kernel,
            pointers | dict.fromkeys("mnk", "i32"),
            constants(QuantScheme.parse(scheme)) | switches | sizes,
            {"num_warps": int(shape["warps"]), "num_stages": int(shape["stages"])},
            ("n", "k"),
            () if scheme == MIXED and "mma.sync.block_scale" in target.features else ("block_scaled",),
        )


def _quantizers(names: tuple[str, ...], target: Target) -> Iterator[AotCase]:
    """With scales in tiles, too, where another kernel takes them (`block_scaled_cutedsl`)."""
    for name in names:
        yield aot_case(name)
        if "tcgen05" in target.features:
            yield aot_case(name, tiled=True)


EXAMPLES = (
    "m=0,n=64,k=128,w={w}",
    "m=1,n=40,k=96,w={w}",
    "m=7,n=257,k=1152,x=fp16,w={w},epilogue=bias",
    "m=33,n=6,k=384,w={w},epilogue=bias+silu_mul",
    "m=130,n=72,k=256,x=fp32,w={w},epilogue=bias+residual",
)
KERNELS = tuple(
    Kernel(
        op="linear",
        name=f"linear_{name}_triton",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot_{name}",
        requires=Requirement(features=features, code="triton"),
        summary="x quantized in launches of its own; codes and scales of both operands to block-scaled tensor cores",
        accepts=partial(_refusal, schemes_of(name)),
        config=config,
        workspace=workspace,
        layouts=("plain_v1",),
        examples=tuple(example.format(w=w) for w in schemes_of(name) for example in EXAMPLES),
        priority=52,
    )
    for name, features in FEATURES.items()
)
