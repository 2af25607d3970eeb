"""RMSNorm in Triton: one program per row; rows up to 16,384 stay in registers, longer ones are read twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import RmsNormCall

LONGEST_ROW = 16384


def config(problem: Problem, target: Target) -> Config:
    """The whole row in registers while it fits, one warp for each 512 elements of it."""
    block = min(LONGEST_ROW, max(64, next_power_of_2(problem.integer("n"))))
    return {"block": block, "warps": min(16, max(1, block // 512))}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The same block at other warp counts."""
    block = config(problem, target)["block"]
    return [{"block": block, "warps": warps} for warps in (1, 2, 4, 8, 16)]


@jit
def rms_norm_kernel(
    x,
    weight,
    out,
    x_stride,
    out_stride,
    n,
    eps,
    BLOCK: tl.constexpr,
    ONE_PASS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * out_stride
    columns = tl.arange(0, BLOCK)
    if ONE_PASS:
        inside = columns < n
        values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / n + eps)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n, BLOCK):
            values = tl.load(x + start + columns, mask=start + columns < n, other=0.0).to(tl.float32)
            total += values * values
        scale = 1.0 / tl.sqrt(tl.sum(total, 0) / n + eps)
        for start in range(0, n, BLOCK):
            inside = start + columns < n
            values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
            gain = tl.load(weight + start + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + start + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def options(config: Config, n: int, x: Tensor) -> dict[str, Any]:
    """What launches over rows of n elements pass by name."""
    block = int(config["block"])
    return {"BLOCK": block, "ONE_PASS": n <= block, "num_warps": config["warps"], **overlapped(x)}


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    n = call.x.shape[-1]
    rows = call.x.numel() // n if n else 0
    if rows:
        rms_norm_kernel[(rows,)](
            call.x,
            call.weight,
            call.out,
            row_stride(call.x),
            row_stride(call.out),
            n,
            call.eps,
            **options(config, n, call.x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: both paths, in bf16."""
    pointers = {"x": "*bf16", "weight": "*bf16", "out": "*bf16"}
    sizes = {"x_stride": "i32", "out_stride": "i32", "n": "i32", "eps": "fp32"}
    return [
        AotCase(
            "one_pass",
            rms_norm_kernel,
            pointers | sizes,
            {"BLOCK": 4096, "ONE_PASS": True} | overlap_on(target),
            {"num_warps": 8},
        ),
        AotCase(
            "two_pass",
            rms_norm_kernel,
            pointers | sizes,
            {"BLOCK": 8192, "ONE_PASS": False} | overlap_on(target),
            {"num_warps": 8},
        ),
    ]


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row, float32 inside",
    config=config,
    space=space,
    supports=("w",),
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
