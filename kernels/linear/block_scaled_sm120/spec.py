"""Linear with weights and activations in NVFP4, MXFP4 or MXFP8 for GPUs with block-scaled mma.sync: GeForce RTX 50, RTX PRO Blackwell (sm_120)
and GB10 (sm_121).

x is quantized by the rules of `quant/activations.py` (`_quantize_blocks_sm120f.cu`) and multiplied in the next launch (`product.cuh`). Weights
stay as checkpoints have them, in plain_v1. The factor of NVFP4 is that of all rows of x, which takes a launch of its own; so a row's
result depends on the other rows, and with every format on how K is divided.

The instruction is that of PTX ISA 8.7, "mma with block scaling"; layouts of its operands are CUTLASS's (cute/atom/mma_traits_sm120.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_sm120.shapes import COLUMNS, ranked, room_of

FP4 = {"nvfp4.nvfp4": "nvfp4", "mxfp4.mxfp4": "mxfp4"}
FP8 = {"mxfp8.mxfp8": "mxfp8"}
"""Scheme -> the format of both operands."""
PROCESSORS = 48
"""Multiprocessors of a target that does not say how many it has: those of a GB10."""
TRIED = 16
"""Configurations that tuning tries."""


EXAMPLES = (
    "m=0,n=64,k=128,w={w}",
    "m=1,n=4112,k=4096,w={w}",
    "m=7,n=257,k=1152,x=fp16,w={w},epilogue=bias",
    "m=65,n=6,k=384,w={w},epilogue=bias+silu_mul",
    "m=257,n=131,k=256,x=fp16,w={w},epilogue=bias+residual",
    "m=300,n=520,k=4096,w={w},epilogue=residual",
    "m=130,n=264,k=640,w={w},epilogue=bias+residual+silu_mul",
)


def _format(problem: Problem) -> str:
    return QuantScheme.parse(problem.text("w")).weights


def _refusal(problem: Problem, schemes: dict[str, str]) -> str | None:
    scheme, k = str(QuantScheme.parse(problem.text("w"))), problem.integer("k")
    if scheme not in schemes:
        return f"multiplies {' and '.join(schemes)}, not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    if k % COLUMNS:
        return f"copies {COLUMNS} columns at a time: needs K a multiple of {COLUMNS}, got K={k}"
    return None


def accepts_fp4(problem: Problem) -> str | None:
    """NVFP4 by NVFP4 and MXFP4 by MXFP4, fp16 or bf16, whole slots of columns."""
    return _refusal(problem, FP4)


def accepts_mxfp8(problem: Problem) -> str | None:
    """MXFP8 by MXFP8, fp16 or bf16, whole slots of columns."""
    return _refusal(problem, FP8)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The shapes and partitions that suit the problem, best first by the model."""
    sizes = problem.integers(*"mnk")
    for _, candidate in ranked(_format(problem), *sizes, target.multiprocessors or PROCESSORS)[:TRIED]:
        yield {**candidate}


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters, zero before a call and after it; partial sums; quantized rows of x; gate and up before they are multiplied."""
    m, n, k = problem.integers(*"mnk")
    gated = n if "silu_mul" in problem.flags("epilogue") else 0
    return Workspace(room_of(config, m, k, gated).size, zeroed=True)


def _kernel(
    name: str, accepts: Callable[[Problem], str | None], schemes: dict[str, str], summary: str
) -> Kernel:
    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.linear.block_scaled_sm120._launch:launch",
        requires=Requirement(
            features=(frozenset({"mma.sync.block_scale", "cp_async", "ldmatrix"}),),
            vendors=("nvidia",),
            code="cuda:compute_120f",
        ),
        summary=summary,
        accepts=accepts,
        config=config,
        space=space,
        workspace=workspace,
        layouts=("plain_v1",),
        examples=tuple(example.format(w=w) for w in schemes for example in EXAMPLES),
        priority=104,
    )


KERNELS = (
    _kernel(
        "linear_fp4_sm120",
        accepts_fp4,
        FP4,
        "x quantized in launches of its own; 4-bit operands and their scales to block-scaled mma.sync, deterministic stream-K",
    ),
    _kernel(
        "linear_mxfp8_sm120",
        accepts_mxfp8,
        FP8,
        "x quantized in a launch of its own; 8-bit operands and their scales to block-scaled mma.sync, deterministic stream-K",
    ),
)
