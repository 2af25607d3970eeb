"""Linear in Triton, for every device Triton reaches: dense weights, and every weight-only scheme over plain_v1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.linear._triton import product, weight_arguments, weight_case

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def accepts_dense(problem: Problem) -> str | None:
    """Dense weights only."""
    scheme = QuantScheme.parse(problem.text("w"))
    return None if scheme.is_dense else f"multiplies dense weights, not {scheme}"


def accepts_quantized(problem: Problem) -> str | None:
    """Weight-only schemes of ALL_WEIGHT_SCHEMES, and integers of 4 and 8 bits in other groups, of a power of two from 32 on."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.is_dense:
        return "multiplies quantized weights, not dense ones"
    if not scheme.is_named and not _is_alike(scheme):
        return f"decodes the schemes of ALL_WEIGHT_SCHEMES and their integers in other groups, not {scheme}"
    return (
        None
        if scheme.activation is None
        else f"takes activations in their own dtype, not {scheme.activation}"
    )


def _is_alike(scheme: QuantScheme) -> bool:
    """Whether the codes are those of a named scheme, and a step along K stays within a group: GGUF's Q8_0, which is int8_g32."""
    size = scheme.group_size or 0
    return (
        scheme.is_integer
        and scheme.bits in (4, 8)
        and not scheme.minimums
        and size >= 32
        and size & (size - 1) == 0
    )


def config(problem: Problem, target: Target) -> Config:
    """Tiles with as many rows as M needs; a step along K stays within one group or covers whole groups."""
    scheme = QuantScheme.parse(problem.text("w"))
    m, is_fp32 = problem.integer("m"), problem.text("x") == "fp32"
    rows = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 512 or is_fp32 else 128
    return {"scheme": scheme.name, **tile(scheme, rows, 32 if is_fp32 else 64 if m > 16 else 128, target)}


def tile(scheme: QuantScheme, rows: int, max_step: int, target: Target) -> dict[str, int]:
    """Rows, columns and step of a tile, and its warps, such that default tiles spill registers on no target.

    Without matrix instructions (before sm_80 Triton uses none) each thread multiplies its own part of a tile, which has
    to be small. RDNA and consumer Blackwell hold a tile of 64 rows in the registers of 8 warps.
    """
    if not target.features & {"mma.bf16", "mfma", "wmma"}:
        return {"bm": min(rows, 32), "bn": 32, "bk": step_along_k(scheme, 32), "warps": 4, "stages": 2}
    warps = 8 if rows >= 64 and target.features & {"wmma", "mma.sync.block_scale"} else 4
    return {"bm": rows, "bn": 64, "bk": step_along_k(scheme, max_step), "warps": warps, "stages": 3}


def step_along_k(scheme: QuantScheme, max_step: int) -> int:
    """Columns of the weight per step: whole groups of 16, which are scaled before the product, or a part of one group of
    another size, whose sum is scaled after the product.
    """
    return max_step if scheme.group_size == 16 else min(scheme.group_size or 128, max_step)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Other tile widths, warps and depths of the pipeline."""
    base = dict(config(problem, target))
    return [
        base | {"bn": columns, "warps": warps, "stages": stages}
        for columns in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]


@jit
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
    for half in tl.static_range(2 if SILU else 1):  # gate, then up
        z = product(
            x,
            weight,
            scales,
            zeros,
            row_scale,
            row_block,
            perm,
            rows,
            row_mask,
            ns + half * n,
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
            z += tl.load(bias + ns + half * n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if half == 0:
            y = z
        else:
            y = y / (1.0 + tl.exp(-y)) * z
    at = rows[:, None] * n + ns[None, :]
    inside = row_mask[:, None] & n_mask[None, :]
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], one dense tensor or the six tensors of plain_v1 -> out [..., N or N / 2]."""
    k, columns_out = call.x.shape[-1], call.out.shape[-1]
    m = call.x.numel() // k
    if m == 0:
        return
    tensors, sizes, constants = weight_arguments(config, call.x, call.weight)
    grid = (cdiv(columns_out, int(config["bn"])), cdiv(m, int(config["bm"])))
    linear_kernel[grid](
        call.x,
        *tensors,
        call.x if call.bias is None else call.bias,
        call.x if call.residual is None else call.residual,
        call.out,
        m,
        columns_out,
        k,
        *sizes,
        **constants,
        BIAS=call.bias is not None,
        RESIDUAL=call.residual is not None,
        SILU=call.silu_mul,
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
    """Dense, and one scheme of every code and scale format, with the tiles of the default configuration, or of another one."""
    ints = dict.fromkeys(("m", "n", "k", "columns", "x_stride", "row_bytes", "groups"), "i32")
    epilogue = dict.fromkeys(("BIAS", "RESIDUAL", "SILU"), False)
    op, cases = default_registry().op("linear"), []

    def case(name: str, text: str, **flags: bool) -> None:
        problem = op.problem(f"n=4096,k=4096,{text}")
        tile, x = config(problem, target), f"*{problem.text('x')}"
        epilogue_flags = {flag: flags.pop(flag, False) for flag in epilogue}
        types, constants = weight_case(problem, tile, **flags)
        cases.append(
            AotCase(
                name,
                linear_kernel,
                types | dict.fromkeys(("x", "bias", "residual", "out"), x) | ints,
                constants | epilogue_flags,
                {"num_warps": int(tile["warps"]), "num_stages": int(tile["stages"])},
                ("k", "columns", "x_stride", "row_bytes"),
                () if constants["FP32"] else matrix_product(target, int(tile["bm"])),
            )
        )

    case("dense_bf16", "m=1024")
    case("dense_fp32", "m=32,x=fp32,w=fp32")
    case("int4_g128", "m=16,w=int4_g128", BIAS=True)
    case("int4_g32_zp_act_order", "m=512,x=fp16,w=int4_g32_zp", HAS_ZERO=True, PERM=True)
    case("int8_ch_silu", "m=16,w=int8_ch", SILU=True)
    case("fp8_block", "m=512,w=fp8_block", ROW_BLOCK=True, RESIDUAL=True)
    case("mxfp4", "m=16,w=mxfp4")
    case("nvfp4", "m=16,w=nvfp4", ROW_SCALE=True)
    return cases


EXAMPLES = (
    "m=5,n=40,k=96,w=int8_g32",
    "m=2,n=33,k=100,x=fp32,w=int8_g32",
    "m=18,n=34,k=512,x=fp16,w=int4_g256_zp",
)
"""Schemes without a name of their own."""

KERNELS = tuple(
    Kernel(
        op="linear",
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
        examples=examples,
        priority=50,
    )
    for name, layout, accepts, examples, summary in (
        ("linear_triton", "dense_v1", accepts_dense, (), "tiles of tl.dot; float32 is IEEE"),
        (
            "linear_w_triton",
            "plain_v1",
            accepts_quantized,
            EXAMPLES,
            "codes decoded by integer arithmetic, sums scaled in float32",
        ),
    )
)
