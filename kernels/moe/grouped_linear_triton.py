"""Grouped linear in Triton, for every device Triton reaches: dense weights, and every weight-only scheme over plain_v1."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.linear_triton import accepts_dense, accepts_quantized, tile


def config(problem: Problem, target: Target) -> Config:
    """Tiles as high as an expert's share of the rows asks for; a step along K stays inside one group, or covers whole ones."""
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


KERNELS = tuple(
    Kernel(
        op="grouped_linear",
        name=name,
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.moe._grouped_linear_triton:launch",
        aot=f"gristmill.kernels.moe._grouped_linear_triton:aot_{'dense' if layout == 'dense_v1' else 'quantized'}",
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
