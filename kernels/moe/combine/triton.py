"""Combine in Triton: float32 sums in registers, k in order, no atomics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import CombineCall


def block_config(hidden: int) -> Config:
    """Up to 1024 columns per program."""
    return {"block": min(1024, max(16, next_power_of_2(hidden))), "warps": 4}


def config(problem: Problem, target: Target) -> Config:
    """The default for the problem's width."""
    return block_config(problem.integer("h"))


@jit
def combine_kernel(y, inverse, weights, out, top_k, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(top_k):
        place = tl.load(inverse + token * top_k + k).to(tl.int64)
        weight = tl.load(weights + token * top_k + k)
        valid = inside & (columns * 0 + place >= 0)
        row = tl.load(y + place * width + columns, mask=valid, other=0.0).to(tl.float32)
        total += tl.where(valid, weight * row, 0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: CombineCall) -> None:
    """y [P, H] -> out [T, H]."""
    (tokens, top_k), width = call.weights.shape, call.y.shape[1]
    if tokens:
        block = int(config["block"])
        combine_kernel[(tokens, cdiv(width, block))](
            call.y,
            call.inverse,
            call.weights,
            call.out,
            top_k,
            width,
            BLOCK=block,
            num_warps=config["warps"],
            **overlapped(call.y),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds."""
    types = {
        "y": "*bf16",
        "inverse": "*i32",
        "weights": "*fp32",
        "out": "*bf16",
        "top_k": "i32",
        "width": "i32",
    }
    return [
        AotCase(
            "bf16", combine_kernel, types, {"BLOCK": 1024} | overlap_on(target), {"num_warps": 4}, ("width",)
        )
    ]


KERNEL = Kernel(
    op="combine",
    name="combine_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and stretch of columns, k in order",
    config=config,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
