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
    """Weight-only schemes that have a name of their own."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.is_dense:
        return "multiplies quantized weights, not dense ones"
    if not scheme.is_named:
        return f"decodes the schemes of ALL_WEIGHT_SCHEMES, not {scheme}"
    return None if scheme.activation is None else f"takes activations in their own dtype, not {scheme.activation}"


def config(problem: Problem, target: Target) -> Config:
    """Tiles as high as M asks for; a step along K stays inside one group, or covers whole ones."""
    scheme = QuantScheme.parse(problem.text("w"))
    m, wide = problem.integer("m"), problem.text("x") == "fp32"
    rows = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 512 or wide else 128
    widest = 32 if wide else 64 if m > 16 else 128
    return {"scheme": scheme.name, "bm": rows, "bn": 64, "bk": step_along_k(scheme, widest), "warps": 4, "stages": 3}


def step_along_k(scheme: QuantScheme, widest: int) -> int:
    """Columns of the weight a step multiplies: whole groups of 16, which are scaled before the product, or a part of one
    group of another size, whose sum is scaled after it.
    """
    return widest if scheme.group_size == 16 else min(scheme.group_size or 128, widest)


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
