"""silu(gate) · up in Triton: one program per row and block of columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulCall

LARGEST_BLOCK = 1024


def config(problem: Problem, target: Target) -> Config:
    """Blocks of at most 1,024 columns, eight elements per thread."""
    block = min(LARGEST_BLOCK, max(32, next_power_of_2(problem.integer("n"))))
    return {"block": block, "warps": max(1, block // 256)}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Column blocks from 256 to 4,096 at the warp counts that give a thread 4 to 16 elements."""
    longest = next_power_of_2(problem.integer("n"))
    blocks = sorted({min(block, max(32, longest)) for block in (256, 512, 1024, 2048, 4096)})
    return [
        {"block": block, "warps": warps}
        for block in blocks
        for warps in (1, 2, 4, 8)
        if 4 <= block // (32 * warps) <= 16 or len(blocks) == 1
    ]


@jit
def silu_and_mul_kernel(x, out, x_stride, out_stride, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x += row * x_stride
    gate = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + n + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, product.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: SiluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    n, block = call.out.shape[-1], int(config["block"])
    rows = call.out.numel() // n
    if rows:
        silu_and_mul_kernel[(rows, cdiv(n, block))](
            call.x,
            call.out,
            row_stride(call.x),
            row_stride(call.out),
            n,
            BLOCK=block,
            num_warps=config["warps"],
            **overlapped(call.x),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: the block that long rows take, in bf16 and fp32."""
    sizes = {"x_stride": "i32", "out_stride": "i32", "n": "i32"}
    return [
        AotCase(
            name,
            silu_and_mul_kernel,
            {"x": f"*{name}", "out": f"*{name}"} | sizes,
            {"BLOCK": 1024} | overlap_on(target),
            {"num_warps": 4},
        )
        for name in ("bf16", "fp32")
    ]


KERNEL = Kernel(
    op="silu_and_mul",
    name="silu_and_mul_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row and block of columns, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
