"""Grouped linear in Triton: linear's tile product, on tiles of rows that never cross an expert.

The number of tiles depends on the offsets, which are on the device: the grid has the maximum number; each program
counts the tiles of the experts before its own, and exits if it is past the last tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.linear._triton import product, weight_arguments, weight_case
from gristmill.kernels.linear.triton import accepts_dense, accepts_quantized, tile
from gristmill.kernels.moe._swiglu_triton import swiglu

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as an expert has on average; a step along K stays within one group or covers whole groups."""
    scheme = QuantScheme.parse(problem.text("w"))
    share, is_fp32 = problem.integer("m") // problem.integer("e"), problem.text("x") == "fp32"
    rows = 16 if share <= 16 else 32 if share <= 64 else 64
    return {"scheme": scheme.name, **tile(scheme, rows, 32 if is_fp32 else 64, target)}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Other tiles, warps and depths of the pipeline."""
    base = dict(config(problem, target))
    return [
        base | {"bm": rows, "bn": columns, "warps": warps, "stages": stages}
        for rows in (16, 32, 64, 128)
        for columns in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]


# What differs between problems of one configuration alone is not compiled in: what was verified on fewer rows and experts serves all.
@jit(do_not_specialize=["m", "experts", "top_k"])  # type: ignore[call-arg, untyped-decorator]
def grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    zeros,
    row_scale,
    row_block,
    perm,
    offsets,
    permutation,
    bias,
    out,
    alpha,
    limit,
    m,
    experts,
    n,
    weight_rows,
    k,
    columns,
    row_bytes,
    groups,
    scale_rows,
    top_k,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PERM: tl.constexpr,
    GATHER: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """n: columns of the output; weight_rows: rows of an expert's weight; scale_rows: rows of its scales."""
    dtype: tl.constexpr = tl.float32 if FP32 else x.dtype.element_ty
    tile = tl.program_id(1)
    e = tl.arange(0, BE)
    starts = tl.load(offsets + e, mask=e < experts, other=0)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=0)
    tiles = (ends - starts + BM - 1) // BM
    through = tl.cumsum(tiles, 0)
    expert = tl.sum((through <= tile).to(tl.int32), 0)
    ns = tl.program_id(0) * BN + tl.arange(0, BN)
    n_mask = ns < n
    last = tl.load(offsets + experts)
    if expert < BE:
        is_expert = e == expert
        start = tl.sum(tl.where(is_expert, starts, 0), 0)
        end = tl.sum(tl.where(is_expert, ends, 0), 0)
        first = tl.sum(tl.where(is_expert, through - tiles, 0), 0)
        rows = start + (tile - first) * BM + tl.arange(0, BM)
        row_mask = rows < end
        source = rows.to(tl.int64)
        if GATHER:
            source = (tl.load(permutation + rows, mask=row_mask, other=0) // top_k).to(tl.int64)
        at = expert.to(tl.int64)
        w = weight + at * weight_rows * row_bytes
        s = scales + at * scale_rows * groups
        z = zeros + at * scale_rows * groups
        r = row_scale + at * weight_rows
        for half in tl.static_range(2 if SILU else 1):  # gate, then up
            part = product(
                x,
                w,
                s,
                z,
                r,
                row_block,
                perm,
                source,
                row_mask,
                ns + half * n,
                n_mask,
                k,
                columns,
                k,
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
                of_row = bias + at * weight_rows + ns + half * n
                part += tl.load(of_row, mask=n_mask, other=0).to(tl.float32)[None, :]
            if half == 0:
                y = part
            else:
                y = swiglu(y, part, alpha, limit, CLAMP)
        to = rows.to(tl.int64)[:, None] * n + ns[None, :]
        tl.store(out + to, y.to(out.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])
    else:
        # Programs past the last tile clear the rows that belong to no expert: there are enough such programs.
        rows = last + (tile - tl.sum(tiles, 0)) * BM + tl.arange(0, BM)
        to = rows.to(tl.int64)[:, None] * n + ns[None, :]
        zero = tl.zeros([BM, BN], dtype=tl.float32).to(out.dtype.element_ty)
        tl.store(out + to, zero, mask=(rows < m)[:, None] & n_mask[None, :])


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K], one dense tensor or the six tensors of plain_v1 -> out [P, N or N / 2].

    The configuration may have the bound of experts that a program finds its own among, a power of two, as ``be``.
    """
    (m, columns_out), k, experts = call.out.shape, call.x.shape[1], call.expert_offsets.shape[0] - 1
    if m == 0:
        return
    tensors, (columns, _, row_bytes, groups), constants = weight_arguments(config, call.x, call.weight)
    scale_rows, groups = (tensors[1].shape[1], groups) if len(call.weight) > 1 else (0, 0)
    bm, bn = int(config["bm"]), int(config["bn"])
    # Each expert wastes less than one tile, and so does the part behind the last.
    tiles = min(m, cdiv(m, bm) + experts + 1)
    grouped_linear_kernel[(cdiv(columns_out, bn), tiles)](
        call.x,
        *tensors,
        call.expert_offsets,
        call.expert_offsets if call.permutation is None else call.permutation,
        call.x if call.bias is None else call.bias,
        call.out,
        call.alpha,
        call.limit,
        m,
        experts,
        columns_out,
        tensors[0].shape[1],
        k,
        columns,
        row_bytes,
        groups,
        scale_rows,
        call.top_k,
        **constants,
        GATHER=call.permutation is not None,
        SILU=call.silu_mul,
        BIAS=call.bias is not None,
        CLAMP=call.clamp,
        BE=int(config.get("be", 0)) or next_power_of_2(experts),
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def aot_dense(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the dense kernel."""
    return [case for case in aot(target) if case.name.startswith("dense")]


def aot_quantized(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the weight-only kernel."""
    return [case for case in aot(target) if not case.name.startswith("dense")]


def aot(target: Target, config: Callable[[Problem, Target], Config] = config) -> list[AotCase]:
    """Dense, and schemes of every code format, with the tiles of the default configuration, or of another one."""
    ints = dict.fromkeys(
        ("m", "experts", "n", "weight_rows", "k", "columns", "row_bytes", "groups", "scale_rows", "top_k"),
        "i32",
    )
    op, cases = default_registry().op("grouped_linear"), []

    def case(name: str, text: str, **flags: bool) -> None:
        problem = op.problem(f"e=128,n=2048,k=4096,{text}")
        tile = config(problem, target)
        switches = {flag: flags.pop(flag, False) for flag in ("GATHER", "SILU", "BIAS", "CLAMP")}
        types, constants = weight_case(problem, tile, **flags)
        types |= {"x": "*bf16", "offsets": "*i32", "permutation": "*i32", "out": "*bf16"}
        types |= {"bias": "*bf16", "alpha": "fp32", "limit": "fp32"}
        cases.append(
            AotCase(
                name,
                grouped_linear_kernel,
                types | ints,
                constants | switches | {"BE": 128},
                {"num_warps": int(tile["warps"]), "num_stages": int(tile["stages"])},
                ("k", "columns", "row_bytes"),
                matrix_product(target, int(tile["bm"])),
            )
        )

    case("dense_silu", "m=256", SILU=True, GATHER=True)
    case("int4_g128", "m=256,w=int4_g128")
    case("fp8_block", "m=16384,w=fp8_block", ROW_BLOCK=True)
    case("mxfp4_silu", "m=256,w=mxfp4", SILU=True)
    case("mxfp4_clamp", "m=256,w=mxfp4", SILU=True, BIAS=True, CLAMP=True)
    case("nvfp4", "m=256,w=nvfp4", ROW_SCALE=True)
    return cases


KERNELS = tuple(
    Kernel(
        op="grouped_linear",
        name=name,
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:aot_{'dense' if layout == 'dense_v1' else 'quantized'}",
        requires=Requirement(code="triton"),
        summary=summary,
        accepts=accepts,
        config=config,
        space=space,
        layouts=(layout,),
        priority=50,
    )
    for name, layout, accepts, summary in (
        (
            "grouped_linear_triton",
            "dense_v1",
            accepts_dense,
            "linear's tiles; each program finds its expert from the offsets",
        ),
        (
            "grouped_linear_w_triton",
            "plain_v1",
            accepts_quantized,
            "the same over codes decoded by integer arithmetic",
        ),
    )
)
