"""Grouped linear over block-scaled codes in Triton: grouped_linear_mx_triton, grouped_linear_nvfp4_triton.

Rows are quantized once and gathered as codes. Products are those of linear_mx_triton and linear_nvfp4_triton, by `tl.dot_scaled`, on tiles of rows of
one expert; NVFP4 has a factor for each row. The epilogue has biases and silu(gate) · up. `moe_mx_triton` and `moe_nvfp4_triton` run two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.linear._plain_blocks import need_blocks
from gristmill.kernels.linear.block_scaled_triton._product import block_scaled_product
from gristmill.kernels.linear.block_scaled_triton.kernel import FEATURES, MIXED, constants, schemes_of, tile
from gristmill.kernels.linear.block_scaled_triton.quantize import OPERANDS, aot_case, maxima_case, quantize
from gristmill.kernels.moe._block_scaled_chain import room_of_rows, sizes_of_rows
from gristmill.kernels.moe._swiglu_triton import swiglu

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall


@jit
def tile_of_expert(offsets, experts, tile, BE: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile of BM rows, BE past the last tile; the tile's first row, and the end of the expert's rows."""
    e = tl.arange(0, BE)
    starts = tl.load(offsets + e, mask=e < experts, other=0)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=0)
    tiles = (ends - starts + BM - 1) // BM
    through = tl.cumsum(tiles, 0)
    expert = tl.sum((through <= tile).to(tl.int32), 0)
    own = e == expert
    first = tl.sum(tl.where(own, starts + (tile - through + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(own, ends, 0), 0)


@jit
def experts_kernel(
    x,
    x_scales,
    x_factor,
    weight,
    w_scales,
    w_factor,
    offsets,
    permutation,
    bias,
    out,
    alpha,
    limit,
    experts,
    n,
    k,
    top_k,
    X: tl.constexpr,
    W: tl.constexpr,
    X_PACKED: tl.constexpr,
    W_PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    NVFP4: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CLAMP: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """n: columns of the output; with SILU an expert's weight has 2 n rows, gate first. Rows of no expert are not written."""
    expert, first, end = tile_of_expert(offsets, experts, tl.program_id(1), BE, BM)
    if expert < BE:
        ns = tl.program_id(0) * BN + tl.arange(0, BN)
        n_mask = ns < n
        rows = first + tl.arange(0, BM)
        row_mask = rows < end
        source = rows.to(tl.int64)
        if GATHER:
            source = (tl.load(permutation + rows, mask=row_mask, other=0) // top_k).to(tl.int64)
        start = expert.to(tl.int64) * (n * (2 if SILU else 1))
        for half in tl.static_range(2 if SILU else 1):  # gate, then up
            w_rows = start + ns + half * n
            z = block_scaled_product(
                x,
                x_scales,
                weight,
                w_scales,
                source,
                row_mask,
                w_rows,
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
                of_x = tl.load(x_factor + source, mask=row_mask, other=0.0)
                z *= of_x[:, None] * tl.load(w_factor + w_rows, mask=n_mask, other=0.0)[None, :]
            if BIAS:
                z += tl.load(bias + w_rows, mask=n_mask, other=0.0).to(tl.float32)[None, :]
            if half == 0:
                y = z
            else:
                y = swiglu(y, z, alpha, limit, CLAMP)
        to = rows.to(tl.int64)[:, None] * n + ns[None, :]
        tl.store(out + to, y.to(out.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


def product(config: Config, room: Tensor, call: GroupedLinearCall) -> None:
    """Rows [R, K], in the order of experts or gathered by a permutation, six tensors of plain_v1 -> out [P, N or N / 2].

    Rows of no expert are not written.

    Args:
        room: bytes for the codes, scales and factors of the R rows.

    Raises:
        ValueError: tensors that are not those of a weight in the format, in the order of x's columns.
    """
    import torch

    x, (codes, scales, _, w_factor, _, _) = call.x, call.weight
    scheme, (given, k), (rows, columns) = QuantScheme.parse(str(config["scheme"])), x.shape, call.out.shape
    experts, n = call.expert_offsets.shape[0] - 1, columns * (2 if call.silu_mul else 1)
    need_blocks(f"experts of {scheme}", scheme, call.weight, (experts, n), k)
    if not rows:
        return
    x_codes, x_scales, factors = room.split([*sizes_of_rows(str(scheme.activation), given, k)])
    x_factor = factors.view(torch.float32)
    quantize(OPERANDS[str(scheme.activation)], x, given, k, x_codes, x_scales, x_factor, by_row=True)
    bm, bn = int(config["bm"]), int(config["bn"])
    # Each expert wastes less than one tile.
    grid = (cdiv(columns, bn), min(rows, cdiv(rows, bm) + experts))
    experts_kernel[grid](
        x_codes,
        x_scales,
        x_factor,
        codes,
        scales.view(torch.uint8),
        w_factor,
        call.expert_offsets,
        call.expert_offsets if call.permutation is None else call.permutation,
        x if call.bias is None else call.bias,
        call.out,
        call.alpha,
        call.limit,
        experts,
        columns,
        k,
        call.top_k,
        **constants(scheme),
        GATHER=call.permutation is not None,
        BIAS=call.bias is not None,
        SILU=call.silu_mul,
        CLAMP=call.clamp,
        BE=next_power_of_2(experts),
        BM=bm,
        BN=bn,
        BK=config["bk"],
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


@jit
def clear_kernel(out, offsets, experts, n, BLOCK: tl.constexpr):
    """Zero a row that is past those of the last expert."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + experts):
        for start in range(0, n, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(out + row * n + columns, tl.zeros([BLOCK], out.dtype.element_ty), mask=columns < n)


def clear(call: GroupedLinearCall) -> None:
    """Zero the rows past those of the last expert. No synchronisation."""
    rows, columns = call.out.shape
    if rows:
        experts = call.expert_offsets.shape[0] - 1
        clear_kernel[(rows,)](call.out, call.expert_offsets, experts, columns, BLOCK=1024)


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Rows [R, K], in the order of experts or gathered by a permutation, six tensors of plain_v1 -> out [P, N or N / 2]."""
    product(config, room_of_rows(str(config["scheme"]), call.x), call)
    clear(call)


def refusal(schemes: tuple[str, ...], problem: Problem, **sizes: int) -> str | None:
    """Why a problem is refused that multiplies these schemes and has columns of such names; None if it is not."""
    scheme = QuantScheme.parse(problem.text("w"))
    if str(scheme) not in schemes:
        return f"multiplies {', '.join(schemes)}, not {scheme}"
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    group = OPERANDS[str(scheme.activation)].group
    if any(size % group for size in sizes.values()):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"needs {' and '.join(sizes)} in multiples of {group}, the columns of a scale, got {given}"
    return None


def accepts(schemes: tuple[str, ...], problem: Problem) -> str | None:
    """None, or the reason why not."""
    return refusal(schemes, problem, K=problem.integer("k"))


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as an expert has on average; tcgen05 multiplies 128 rows."""
    share = cdiv(problem.integer("m"), problem.integer("e"))
    return tiles_for(str(QuantScheme.parse(problem.text("w"))), share, target)


def tiles_for(scheme: str, share: int, target: Target) -> Config:
    """For `share` rows of an expert. Sums of gate and up take the registers of twice the columns where they are not in tensor memory."""
    tcgen05 = "tcgen05" in target.features
    rows = 128 if tcgen05 else 64 if share > 32 else 32 if share > 16 else 16
    return {"scheme": scheme, **tile(scheme, rows, tcgen05 and share > 16, target)}


def _aot(name: str, target: Target) -> Iterator[AotCase]:
    """Every scheme of a kernel, as the first product of experts and as the second, and its quantizers."""
    pointers = dict.fromkeys(("x", "x_scales", "weight", "w_scales"), "*u8")
    pointers |= dict.fromkeys(("x_factor", "w_factor"), "*fp32") | dict.fromkeys(("bias", "out"), "*bf16")
    pointers |= dict.fromkeys(("offsets", "permutation"), "*i32")
    types = pointers | dict.fromkeys(("alpha", "limit"), "fp32")
    types |= dict.fromkeys(("experts", "n", "k", "top_k"), "i32")
    for scheme in schemes_of(name):
        shape = tiles_for(scheme, 128, target)
        sizes = {key.upper(): shape[key] for key in ("bm", "bn", "bk")} | {"BE": 128}
        decoded = scheme == MIXED and "mma.sync.block_scale" in target.features
        for which, first in (("first", True), ("second", False)):
            switches = {"GATHER": first, "BIAS": True, "SILU": first, "CLAMP": False}
            yield AotCase(
                f"{scheme.replace('.', '_')}_{which}",
                experts_kernel,
                types,
                constants(QuantScheme.parse(scheme)) | switches | sizes,
                {"num_warps": int(shape["warps"]), "num_stages": int(shape["stages"])},
                ("n", "k"),
                () if decoded else ("block_scaled",),
            )
    yield AotCase(
        "clear",
        clear_kernel,
        {"out": "*bf16", "offsets": "*i32", "experts": "i32", "n": "i32"},
        {"BLOCK": 1024},
    )
    for form in dict.fromkeys(scheme.partition(".")[2] for scheme in schemes_of(name)):
        yield aot_case(form, by_row=True)
        if not OPERANDS[form].emax:
            yield maxima_case()


def aot_mx(target: Target) -> list[AotCase]:
    """What the compile matrix builds of grouped_linear_mx_triton."""
    return [*_aot("mx", target)]


def aot_nvfp4(target: Target) -> list[AotCase]:
    """What the compile matrix builds of grouped_linear_nvfp4_triton."""
    return [*_aot("nvfp4", target)]


EXAMPLES = (
    "m=0,e=3,n=32,k=32,w={w}",
    "m=27,e=5,n=66,k=96,w={w},gather=3,epilogue=bias+silu_mul+clamp",
    "m=70,e=4,n=40,k=160,x=fp16,w={w},epilogue=bias",
    "m=33,e=1,n=64,k=96,x=fp32,w={w},epilogue=silu_mul",
)
KERNELS = tuple(
    Kernel(
        op="grouped_linear",
        name=f"grouped_linear_{name}_triton",
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot_{name}",
        requires=Requirement(features=features, code="triton"),
        summary="rows quantized once and gathered as codes; both operands to block-scaled tensor cores; every epilogue",
        accepts=partial(accepts, schemes_of(name)),
        config=config,
        layouts=("plain_v1",),
        examples=tuple(example.format(w=w) for w in schemes_of(name) for example in EXAMPLES),
        priority=52,
    )
    for name, features in FEATURES.items()
)
