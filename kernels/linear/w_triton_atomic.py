"""Linear in Triton with split-K and atomic reduction.

A program adds its part of a tile to float32 memory, then increments the counter of the tile. The last program of a tile writes y
and restores the zeros for the next call. No program waits for another; the order of the additions varies, so the last bits of y
differ from call to call.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.common import need_workspace
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.linear._triton import product, weight_arguments, weight_case
from gristmill.kernels.linear.triton import accepts_quantized
from gristmill.kernels.linear.triton import config as whole_config
from gristmill.kernels.linear.triton import space as whole_space

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64
"""Maximum number of rows of x: each program writes and reads float32 sums."""
PROGRAMS = 4
"""Programs per multiprocessor."""


def accepts(problem: Problem) -> str | None:
    """Weight-only schemes of ALL_WEIGHT_SCHEMES, few rows of x."""
    if reason := accepts_quantized(problem):
        return reason
    return None if problem.integer("m") <= ROWS else f"made for M <= {ROWS}, not {problem.integer('m')}"


def config(problem: Problem, target: Target) -> Config:
    """The tiles of linear_w_triton, and as many parts along K as fill the device."""
    return _split(problem, target, whole_config(problem, target))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Other tiles of linear_w_triton, with the default number of parts, half and twice as many."""
    configs = []
    for base in whole_space(problem, target):
        split = int(_split(problem, target, base)["split"])
        configs += [{**base, "split": parts} for parts in sorted({max(1, split // 2), split, split * 2})]
    return configs


def _split(problem: Problem, target: Target, base: Config) -> Config:
    tiles = cdiv(problem.integer("n"), int(base["bn"])) * cdiv(max(1, problem.integer("m")), int(base["bm"]))
    steps = cdiv(problem.integer("k"), int(base["bk"]))
    return {**base, "split": max(1, min(steps, cdiv(PROGRAMS * (target.multiprocessors or 64), tiles)))}


def flag_bytes(m: int, n: int, config: Config) -> int:
    """Bytes of the counters, one per tile; the sums begin after them."""
    return cdiv(4 * prod((cdiv(n, int(config["bn"])), cdiv(m, int(config["bm"])))), 256) * 256


def scratch_bytes(m: int, n: int, config: Config) -> int:
    """Bytes of counters and of sums of m x n, n the rows of the weight. Zero before a call and after it."""
    return flag_bytes(m, n, config) + 4 * m * n


def workspace(problem: Problem, config: Config) -> Workspace:
    return Workspace(scratch_bytes(max(1, problem.integer("m")), problem.integer("n"), config), zeroed=True)


@jit
def atomic_kernel(
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
    flags,
    sums,
    m,
    n,
    k,
    columns,
    x_stride,
    row_bytes,
    groups,
    part,
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
    """n: columns of the output; with SILU the weight has 2 n rows, gate first. part: columns of the weight per program. flags: one int32 per
    tile; sums: float32 [m, rows of the weight]; both zero before and after."""
    dtype: tl.constexpr = tl.float32 if FP32 else x.dtype.element_ty
    ns = tl.program_id(0) * BN + tl.arange(0, BN)
    n_mask = ns < n
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    row_mask = rows < m
    inside = row_mask[:, None] & n_mask[None, :]
    first = tl.program_id(2) * part
    last = tl.minimum(columns, first + part)
    weight_rows = n
    if SILU:
        weight_rows = 2 * n
    at = rows[:, None] * weight_rows + ns[None, :]
    for half in tl.static_range(2 if SILU else 1):  # gate, then up
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
            ns + half * n,
            n_mask,
            k,
            last,
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
            first,
        )
        tl.atomic_add(sums + at + half * n, y, mask=inside, sem="relaxed")
    tl.debug_barrier()  # all threads have added before the program increments the counter
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(flags + tile, 1, sem="acq_rel") == tl.num_programs(2) - 1:
        # Volatile: atomics are performed in L2, and a plain load may hit a stale L1 line.
        y = tl.load(sums + at, mask=inside, other=0.0, volatile=True)
        tl.store(sums + at, tl.zeros([BM, BN], dtype=tl.float32), mask=inside)
        if BIAS:
            y += tl.load(bias + ns, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if SILU:
            up = tl.load(sums + at + n, mask=inside, other=0.0, volatile=True)
            tl.store(sums + at + n, tl.zeros([BM, BN], dtype=tl.float32), mask=inside)
            if BIAS:
                up += tl.load(bias + ns + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
            y = y / (1.0 + tl.exp(-y)) * up
        y_at = rows[:, None] * n + ns[None, :]
        if RESIDUAL:
            y += tl.load(residual + y_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + y_at, y.to(out.dtype.element_ty), mask=inside)
        tl.store(flags + tile, 0)


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
    """x [..., K], the six tensors of plain_v1 -> out [..., N or N / 2]. ValueError for a workspace that is too small or elsewhere."""
    import torch

    k, columns_out = x.shape[-1], out.shape[-1]
    m = x.numel() // k
    if m == 0:
        return
    tensors, sizes, constants = weight_arguments(config, x, weight)
    size = scratch_bytes(m, n, config)
    if workspace is None:
        workspace = torch.zeros(size, dtype=torch.uint8, device=x.device)
    need_workspace("linear", workspace, size, x.device)
    start = flag_bytes(m, n, config)
    flags, sums = workspace[:start].view(torch.int32), workspace[start:size].view(torch.float32)
    bm, bn, bk = int(config["bm"]), int(config["bn"]), int(config["bk"])
    part = cdiv(cdiv(sizes[0], bk), int(config["split"])) * bk
    grid = (cdiv(columns_out, bn), cdiv(m, bm), cdiv(sizes[0], part))
    atomic_kernel[grid](
        x,
        *tensors,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        flags,
        sums,
        m,
        columns_out,
        k,
        *sizes,
        part,
        **constants,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SILU=silu_mul,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: a scheme with groups, and one with scales per row, with gate and up."""
    ints = dict.fromkeys(("m", "n", "k", "columns", "x_stride", "row_bytes", "groups", "part"), "i32")
    tensors = dict.fromkeys(("x", "bias", "residual", "out"), "*bf16") | {"flags": "*i32", "sums": "*fp32"}
    op, cases = default_registry().op("linear"), []
    for scheme, silu_mul in (("int4_g128", False), ("int8_ch", True)):
        problem = op.problem(f"m=16,n=4096,k=4096,w={scheme}")
        tile = config(problem, target)
        types, constants = weight_case(problem, tile)
        cases.append(
            AotCase(
                f"{scheme}_atomic",
                atomic_kernel,
                types | tensors | ints,
                constants | {"BIAS": not silu_mul, "RESIDUAL": False, "SILU": silu_mul},
                {"num_warps": int(tile["warps"]), "num_stages": int(tile["stages"])},
                ("k", "columns", "x_stride", "row_bytes", "part"),
                matrix_product(target, int(tile["bm"])),
            )
        )
    return cases


KERNEL = Kernel(
    op="linear",
    name="linear_w_triton_atomic",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="few rows: split-K with atomic reduction",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    layouts=("plain_v1",),
    deterministic=False,
    auto=False,
    priority=45,
    proven="Triton's interpreter; not yet on a GPU",
)
