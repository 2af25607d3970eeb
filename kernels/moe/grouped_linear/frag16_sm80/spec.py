"""Grouped linear by mma.sync and cp.async over frag16 tiles for every NVIDIA GPU from sm_80 on (grouped.cuh): grouped_linear_sm80.

The formats are those of the dense kernels (linear/frag16_sm80/formats.py): int4 with and without zero points, int8, FP8, mxfp4, nvfp4, and
GGUF's groups of 4 to 6 bits.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_linear.frag16_sm80 import shapes

REQUIRES = Requirement(
    features=(frozenset({"mma.bf16", "cp_async", "ldmatrix"}),),
    vendors=("nvidia",),
    code="cuda:compute_80",
)


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if problem["act_order"]:
        return "takes no weights with act-order"
    scheme, silu_mul = QuantScheme.parse(problem.text("w")), "silu_mul" in problem.flags("epilogue")
    e, n, k = problem.integers(*"enk")
    return shapes.refusal(scheme, problem.text("x"), e, n, k, silu_mul)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape, the default first."""
    scheme, (m, e) = QuantScheme.parse(problem.text("w")), problem.integers(*"me")
    return shapes.configs(scheme, m, e, target.multiprocessors)


def config(problem: Problem, target: Target) -> Config:
    """The shape of a CTA for the rows that an expert has on average."""
    return next(iter(space(problem, target)))


def sources(problem: Problem) -> tuple[str, ...]:
    """The native sources of the weight's format, as far as they are rare."""
    return shapes.sources_of(QuantScheme.parse(problem.text("w")))


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_sm80",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.moe.grouped_linear.frag16_sm80._launch:launch",
    requires=REQUIRES,
    summary="the tiles of linear's gemm over a list made on the device; rows of x gathered by cp.async; every epilogue",
    accepts=accepts,
    config=config,
    space=space,
    sources=sources,
    layouts=shapes.TILE_LAYOUTS,
    examples=(
        "m=19,e=4,n=96,k=256,w=int4_g128,epilogue=silu_mul,gather=3",
        "m=257,e=5,n=200,k=640,x=fp16,w=int4_g32_zp,epilogue=bias",
        "m=33,e=3,n=96,k=96,w=mxfp4,gather=2,epilogue=bias+silu_mul+clamp",
        "m=70,e=3,n=80,k=144,w=nvfp4,gather=2",
        "m=40,e=3,n=130,k=256,x=fp16,w=int8_g32",
        "m=300,e=2,n=160,k=264,w=fp8_block,epilogue=silu_mul",
        "m=50,e=4,n=72,k=256,w=int4_g32_min",
        "m=150,e=3,n=64,k=272,x=fp16,w=int6_g16,epilogue=silu_mul,gather=2",
    ),
    priority=60,
)
