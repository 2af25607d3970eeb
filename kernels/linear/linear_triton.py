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
    return (
        None
        if scheme.activation is None
        else f"takes activations in their own dtype, not {scheme.activation}"
    )


def config(problem: Problem, target: Target) -> Config:
    """Tiles as high as M asks for; a step along K stays inside one group, or covers whole ones."""
    scheme = QuantScheme.parse(problem.text("w"))
    m, wide = problem.integer("m"), problem.text("x") == "fp32"
    rows = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 512 or wide else 128
    return {"scheme": scheme.name, **tile(scheme, rows, 32 if wide else 64 if m > 16 else 128, target)}


def tile(scheme: QuantScheme, rows: int, widest: int, target: Target) -> dict[str, int]:
    """Rows, columns and step of a tile, and its warps, such that the default tile of no target spills registers.

    Without matrix instructions (before sm_80 Triton uses none) each thread multiplies its own part of a tile, which has
    to be small. RDNA and consumer Blackwell hold a tile of 64 rows in the registers of 8 warps.
    """
    if not target.features & {"mma.bf16", "mfma", "wmma"}:
        return {"bm": min(rows, 32), "bn": 32, "bk": step_along_k(scheme, 32), "warps": 4, "stages": 2}
    warps = 8 if rows >= 64 and target.features & {"wmma", "mma.sync.block_scale"} else 4
    return {"bm": rows, "bn": 64, "bk": step_along_k(scheme, widest), "warps": warps, "stages": 3}


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
