"""Linear in Triton, for every device Triton reaches: dense weights, and every weight-only scheme over plain_v1."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target


def accepts_dense(problem: Problem) -> str | None:
    """Dense weights only."""
    scheme = QuantScheme.parse(problem.text("w"))
    return None if scheme.is_dense else f"multiplies dense weights, not {scheme}"


def accepts_quantized(problem: Problem) -> str | None:
    """Weight-only schemes."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.is_dense:
        return "multiplies quantized weights, not dense ones"
    return None if scheme.activation is None else f"takes activations in their own dtype, not {scheme.activation}"


def config(problem: Problem, target: Target) -> Config:
    """Tiles as high as M asks for; a step along K stays inside one group, or covers whole ones."""
    scheme = QuantScheme.parse(problem.text("w"))
    m, wide = problem.integer("m"), problem.text("x") == "fp32"
    rows = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 512 or wide else 128
    widest = 32 if wide else 64 if m > 16 else 128
    # Groups of 16 are scaled before the product, so a step covers several; other steps stay inside one group.
    step = widest if scheme.group_size == 16 else min(scheme.group_size or 128, widest)
    return {"scheme": scheme.name, "bm": rows, "bn": 64, "bk": step, "warps": 4, "stages": 3}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Other tile widths, warps and depths of the pipeline."""
    base = dict(config(problem, target))
    return [
        base | {"bn": columns, "warps": warps, "stages": stages}
        for columns in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]


KERNELS = tuple(
    Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.linear._linear_triton:launch",
        aot=f"gristmill.kernels.linear._linear_triton:aot_{'dense' if layout == 'dense_v1' else 'quantized'}",
        requires=Requirement(code="triton"),
        summary=summary,
        accepts=accepts,
        config=config,
        space=space,
        layouts=(layout,),
        priority=50,
    )
    for name, layout, accepts, summary in (
        ("linear_triton", "dense_v1", accepts_dense, "tiles of tl.dot; float32 is IEEE"),
        (
            "linear_w_triton",
            "plain_v1",
            accepts_quantized,
            "codes decoded by integer arithmetic, sums scaled in float32",
        ),
    )
)
