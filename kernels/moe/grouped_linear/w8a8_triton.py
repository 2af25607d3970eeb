"""Grouped linear with e4m3 weights and activations in Triton: grouped_linear_w8a8_triton.

Rows are quantized once and gathered as codes; tiles of rows never cross an expert. A product over 128 columns starts from zero in the tensor
cores, whose sums of e4m3 have few bits on sm_89 and sm_90; it is multiplied by the scales of its rows and blocks and added in float32: the sums in
two levels of DeepSeek-V3's report (arXiv:2412.19437, section 3.3.2) and DeepGEMM (github.com/deepseek-ai/DeepGEMM). Gate and up are
neighbouring columns of a tile, so that silu(gate) · up is an epilogue of one product that reads x once. `moe_w8a8_triton` runs two of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import need
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.moe._e4m3_rows_triton import Rows, aot_case, bytes_of, quantize
from gristmill.kernels.moe._swiglu_triton import swiglu
from gristmill.kernels.moe.grouped_linear.block_scaled_triton import clear, tile_of_expert

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall

SCHEMES = ("fp8_block.fp8_g128", "fp8_ch.fp8_token", "fp8.fp8_token")
FEATURES = (frozenset({"mma.fp8"}), frozenset({"mfma.fp8", "fp8.ocp"}), frozenset({"wmma.fp8", "fp8.ocp"}))
"""What the hardware must have, in alternatives. gfx942 has e4m3 of another bias (fnuz), in which no checkpoint is stored."""


@jit
def e4m3_product(
    x,
    x_scales,
    weight,
    w_scales,
    rows,
    row_mask,
    w_rows,
    w_mask,
    scale_rows,
    x_stride,
    x_scale_row,
    x_scale_group,
    k,
    groups,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """float32 [BM, BN] of rows of x and of W, scaled.

    With BLOCKS a scale is of BK columns; otherwise it is of a whole row, and that of x is multiplied at each step all the same: a sum of
    plain products would become one sum in the tensor cores.
    """
    z = tl.zeros([BM, BN], tl.float32)
    of_x, of_w = x_scales + rows * x_scale_row, w_scales + scale_rows * groups
    x_factor = tl.load(of_x, mask=row_mask, other=0.0)
    for k0 in range(0, k, BK):
        columns = k0 + tl.arange(0, BK)
        inside = columns < k
        a = tl.load(
            x + rows[:, None] * x_stride + columns[None, :],
            mask=row_mask[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + w_rows[None, :] * k + columns[:, None], mask=w_mask[None, :] & inside[:, None], other=0.0
        )
        part = tl.dot(a, b)
        if BLOCKS:
            group = k0 // BK
            x_factor = tl.load(of_x + group * x_scale_group, mask=row_mask, other=0.0)
            w_factor = tl.load(of_w + group, mask=w_mask, other=0.0).to(tl.float32)
            z += part * (x_factor[:, None] * w_factor[None, :])
        else:
            z += part * x_factor[:, None]
    if not BLOCKS:
        z *= tl.load(of_w, mask=w_mask, other=0.0).to(tl.float32)[None, :]
    return z


@jit
def e4m3_experts_kernel(
    x,
    x_scales,
    weight,
    w_scales,
    row_block,
    offsets,
    permutation,
    bias,
    out,
    alpha,
    limit,
    experts,
    n,
    k,
    groups,
    block_rows,
    x_stride,
    x_scale_row,
    x_scale_group,
    top_k,
    BLOCKS: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CLAMP: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """n: columns of the output; with SILU an expert's weight has 2 n rows, gate first, and a tile has BN / 2 of either.

    Rows of no expert are not written.
    """
    HALVES: tl.constexpr = 2 if SILU else 1
    expert, first, end = tile_of_expert(offsets, experts, tl.program_id(1), BE, BM)
    if expert < BE:
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        row_mask = rows < end
        if GATHER:
            source = (tl.load(permutation + rows, mask=row_mask, other=0) // top_k).to(tl.int64)
        else:
            source = rows
        from_column = tl.program_id(0) * (BN // HALVES)
        place = tl.arange(0, BN)
        own = from_column + place // HALVES
        w_mask = own < n
        row_of_expert = own + place % HALVES * n
        w_rows = expert.to(tl.int64) * (n * HALVES) + row_of_expert
        if BLOCKS:
            block = tl.load(row_block + row_of_expert, mask=w_mask, other=0)
            scale_rows = expert.to(tl.int64) * block_rows + block
        else:
            scale_rows = w_rows
        z = e4m3_product(
            x,
            x_scales,
            weight,
            w_scales,
            source,
            row_mask,
            w_rows,
            w_mask,
            scale_rows,
            x_stride,
            x_scale_row,
            x_scale_group,
            k,
            groups,
            BLOCKS,
            BM,
            BN,
            BK,
        )
        if BIAS:
            z += tl.load(bias + w_rows, mask=w_mask, other=0.0).to(tl.float32)[None, :]
        if SILU:
            gate, up = tl.split(tl.reshape(z, [BM, BN // 2, 2]))
            y = swiglu(gate, up, alpha, limit, CLAMP)
        else:
            y = z
        ns = from_column + tl.arange(0, BN // HALVES)
        to = out + rows[:, None] * n + ns[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=row_mask[:, None] & (ns < n)[None, :])


def product(config: Config, room: Tensor, call: GroupedLinearCall, given: Rows | None = None) -> None:
    """Rows [R, K], in the order of experts or gathered by a permutation, six tensors of plain_v1 -> out [P, N or N / 2].

    Rows of no expert are not written.

    Args:
        room: bytes for the codes and scales of the R rows.
        given: x as codes and scales, instead.

    Raises:
        ValueError: tensors that are not those of a weight in the format, in the order of x's columns.
    """
    import torch

    x, (codes, scales, _, _, row_block, _) = call.x, call.weight
    scheme, k, (rows, columns) = QuantScheme.parse(str(config["scheme"])), call.x.shape[1], call.out.shape
    experts, n = call.expert_offsets.shape[0] - 1, columns * (2 if call.silu_mul else 1)
    need_e4m3(scheme, call.weight, experts, n, k)
    if not rows:
        return
    of_x = quantize(str(scheme.activation), x, room) if given is None else given
    blocks, bm, bn = scheme.granularity == "block", int(config["bm"]), int(config["bn"])
    # Each expert wastes less than one tile.
    grid = (cdiv(n, bn), min(rows, cdiv(rows, bm) + experts))
    e4m3_experts_kernel[grid](
        of_x.codes,
        of_x.scales,
        codes.view(torch.float8_e4m3fn),
        scales,
        row_block if blocks else call.expert_offsets,
        call.expert_offsets,
        call.expert_offsets if call.permutation is None else call.permutation,
        x if call.bias is None else call.bias,
        call.out,
        call.alpha,
        call.limit,
        experts,
        columns,
        k,
        scales.shape[-1],
        scales.shape[1],
        of_x.codes.stride(0),
        *of_x.scales.stride(),
        call.top_k,
        BLOCKS=blocks,
        GATHER=call.permutation is not None,
        BIAS=call.bias is not None,
        SILU=call.silu_mul,
        CLAMP=call.clamp,
        BE=next_power_of_2(experts),
        BM=bm,
        BN=bn,
        BK=BLOCK,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def need_e4m3(scheme: QuantScheme, weight: list[Tensor], experts: int, n: int, k: int) -> None:
    """ValueError unless the six tensors of plain_v1 are [experts, n, k] weights of a scheme, with columns in order."""
    codes, scales, _, _, row_block, perm = weight
    blocks = scheme.granularity == "block"
    shape, (rows, groups) = (experts, n, k), (row_block.numel(), cdiv(k, BLOCK)) if blocks else (n, 1)
    fits = scales.dim() == 3 and scales.shape[0] == experts and scales.shape[2] == groups
    fits = fits and (blocks or scales.shape[1] == n) and rows == n and scales.is_contiguous()
    need(
        fits and tuple(codes.shape) == shape and codes.numel() == prod(shape) and not perm.numel(),
        f"experts of {scheme}: expected codes {list(shape)} and scales [{experts}, "
        f"{'block rows' if blocks else n}, {groups}]{f' with a block row for each of {n} rows' if blocks else ''} in the order of x's "
        f"columns, got {list(codes.shape)}, {list(scales.shape)} and {row_block.numel()} block rows"
        + (" and a permutation" if perm.numel() else ""),
    )


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Rows [R, K], in the order of experts or gathered by a permutation, six tensors of plain_v1 -> out [P, N or N / 2]."""
    import torch

    size = bytes_of(str(QuantScheme.parse(str(config["scheme"])).activation), *call.x.shape)
    product(config, torch.empty(size, dtype=torch.uint8, device=call.x.device), call)
    clear(call)


def refusal(problem: Problem) -> str | None:
    """Why the weights of a problem are not multiplied; None if they are."""
    scheme = QuantScheme.parse(problem.text("w"))
    if str(scheme) not in SCHEMES:
        return f"multiplies {', '.join(SCHEMES)}, not {scheme}"
    return "takes columns in order, not act-order" if problem["act_order"] else None


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not: sums of e4m3 in tensor cores are not those of float32."""
    if problem.text("x") == "fp32":
        return "takes fp16 or bf16 activations, not fp32"
    return refusal(problem)


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as an expert has on average."""
    return tiles_for(problem.text("w"), cdiv(problem.integer("m"), problem.integer("e")), target)


def tiles_for(scheme: str, share: int, target: Target) -> Config:
    """For `share` rows of an expert: from the fewest that mma.sync has to those that fill a processor, in as many columns as there are registers
    for two sums of them."""
    rows = 16 if share <= 16 else 32 if share <= 32 else 64 if share <= 128 else 128
    spacious = {"wgmma", "mfma"} if rows == 128 else {"wgmma", "mfma", "tcgen05"}
    columns = 128 if rows == 32 or (rows > 32 and spacious & target.features) else 64
    warps, stages = 8 if rows == 128 else 4, 4 if rows == 16 else 3
    return {"scheme": scheme, "bm": rows, "bn": columns, "warps": warps, "stages": stages}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The default, and one other number of rows, columns, warps and stages at a time."""
    return space_of(config(problem, target))


def space_of(base: Config) -> list[Config]:
    """A configuration of tiles and its neighbours."""
    rows, columns, warps, stages = (int(base[name]) for name in ("bm", "bn", "warps", "stages"))
    others: tuple[Config, ...] = (
        {"bm": 2 * rows if rows < 128 else 64, "warps": 8 if rows == 64 else 4},
        {"bn": 192 - columns},
        {"warps": 12 - warps},
        {"stages": stages - 1},
    )
    return [base, *({**base, **other} for other in others)]


def aot(target: Target) -> list[AotCase]:
    """Every form of scales, as the first product of experts and as the second, over few rows and many, and the quantizers."""
    types = dict.fromkeys(("x", "weight"), "*fp8e4nv") | dict.fromkeys(("x_scales", "w_scales"), "*fp32")
    types |= dict.fromkeys(("row_block", "offsets", "permutation"), "*i32")
    types |= dict.fromkeys(("bias", "out"), "*bf16") | dict.fromkeys(("alpha", "limit"), "fp32")
    strides = ("x_stride", "x_scale_row", "x_scale_group")
    types |= dict.fromkeys(("experts", "n", "k", "groups", "block_rows", *strides, "top_k"), "i32")
    cases = [aot_case("fp8_g128"), aot_case("fp8_token")]
    for scheme in SCHEMES[:2]:
        for share in (16, 64, 256):
            tiles = tiles_for(scheme, share, target)
            for which, first in (("first", True), ("second", False)):
                switches = {"GATHER": first, "BIAS": share == 64, "SILU": first, "CLAMP": False}
                sizes = {"BE": 128, "BM": tiles["bm"], "BN": tiles["bn"], "BK": BLOCK}
                cases.append(
                    AotCase(
                        f"{scheme.partition('.')[0]}_{which}_{tiles['bm']}",
                        e4m3_experts_kernel,
                        types,
                        {"BLOCKS": scheme.startswith("fp8_block"), **switches, **sizes},
                        {"num_warps": int(tiles["warps"]), "num_stages": int(tiles["stages"])},
                        ("n", "k", "x_stride"),
                        _promise(target, int(tiles["bm"])),
                    )
                )
    return cases


def _promise(target: Target, rows: int) -> tuple[str, ...]:
    """The instruction that multiplies a tile of so many rows."""
    if rows >= 64 and {"wgmma", "tcgen05"} & target.features:
        return ("wgmma",) if "wgmma" in target.features else ("tcgen05",)
    return tuple(name for name in ("mma", "mfma", "wmma") if f"{name}.fp8" in target.features)


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_w8a8_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(features=FEATURES, code="triton"),
    summary="rows quantized once and gathered as e4m3 codes; sums of 128 columns scaled and added in float32; every epilogue",
    accepts=accepts,
    config=config,
    space=space,
    layouts=("plain_v1",),
    examples=(
        "m=0,e=3,n=32,k=32,w=fp8_block.fp8_g128",
        "m=27,e=5,n=66,k=96,w=fp8_block.fp8_g128,gather=3,epilogue=bias+silu_mul+clamp",
        "m=70,e=4,n=300,k=272,x=fp16,w=fp8_block.fp8_g128,epilogue=bias",
        "m=150,e=1,n=272,k=401,w=fp8_block.fp8_g128,epilogue=silu_mul",
        "m=33,e=33,n=50,k=130,w=fp8_ch.fp8_token,gather=2,epilogue=silu_mul",
        "m=40,e=2,n=33,k=1100,x=fp16,w=fp8_ch.fp8_token",
        "m=21,e=3,n=40,k=160,w=fp8.fp8_token,epilogue=bias+silu_mul",
    ),
    priority=52,
)
