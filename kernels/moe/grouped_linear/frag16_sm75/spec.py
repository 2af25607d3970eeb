"""Grouped linear over frag16 tiles for sm_75 (Turing): grouped_linear_sm75.

It is grouped_linear_sm80, in the formats of linear's kernels for sm_75 and with their products and loads (linear/frag16_sm75): fp16 activations
alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm75.spec import REQUIRES
from gristmill.kernels.moe.grouped_linear.frag16_sm75 import shapes
from gristmill.kernels.moe.grouped_linear.frag16_sm80.shapes import TILE_LAYOUTS


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    (e, n, k), gated = problem.integers(*"enk"), "silu_mul" in problem.flags("epilogue")
    why = shapes.refusal(QuantScheme.parse(problem.text("w")), problem.text("x"), e, n, k, gated)
    return "takes no weights with act-order" if problem["act_order"] else why


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape, the default first."""
    scheme, (m, e) = QuantScheme.parse(problem.text("w")), problem.integers(*"me")
    return shapes.configs(scheme, m, e, target.multiprocessors)


def config(problem: Problem, target: Target) -> Config:
    """The shape of a CTA for the rows that an expert has on average."""
    return next(iter(space(problem, target)))


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_sm75",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.moe.grouped_linear.frag16_sm75._launch:launch",
    requires=REQUIRES,
    summary="fp16: the tiles of linear's gemm for sm_75 over a list made on the device; gathered rows of x; every epilogue",
    accepts=accepts,
    config=config,
    space=space,
    layouts=TILE_LAYOUTS,
    examples=(
        "m=19,e=4,n=96,k=256,x=fp16,w=int4_g128,epilogue=silu_mul,gather=3",
        "m=257,e=5,n=200,k=640,x=fp16,w=int4_g32_zp,epilogue=bias",
        "m=33,e=3,n=96,k=96,x=fp16,w=mxfp4,gather=2,epilogue=bias+silu_mul+clamp",
        "m=70,e=3,n=80,k=144,x=fp16,w=nvfp4,gather=2",
        "m=40,e=3,n=130,k=256,x=fp16,w=int8_g32",
        "m=300,e=2,n=160,k=264,x=fp16,w=fp8_block,epilogue=silu_mul",
        "m=150,e=3,n=64,k=272,x=fp16,w=int6_g16,epilogue=silu_mul,gather=2",
    ),
    priority=55,
)
