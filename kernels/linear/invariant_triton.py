"""Linear in Triton whose rows have the same bits in every batch: tiles whose sums along K do not depend on M.

A matrix instruction adds to each element of its result on its own, so the order of additions depends on the instruction and on the
step along K, not on the number of rows and columns of a tile. On Hopper all tiles have 64 rows or more, for which Triton uses wgmma;
elsewhere there is one tile for all M.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.linear.triton import accepts_dense, accepts_quantized, aot, step_along_k, tile

MULTIPROCESSORS = 132
"""Of a Hopper; another number changes the speed only."""


def config(problem: Problem, target: Target) -> Config:
    """Tiles that fill the device; on Hopper of 64 or 128 rows and of up to 128 columns, elsewhere of one size."""
    scheme, is_fp32 = QuantScheme.parse(problem.text("w")), problem.text("x") == "fp32"
    if "wgmma" not in target.features or is_fp32:
        return {"scheme": scheme.name, **tile(scheme, 32, 32 if is_fp32 else 64, target)}
    m, n = problem.integer("m"), problem.integer("n")
    rows = 64 if m <= 256 else 128
    fills = [columns for columns in (128, 64, 32) if cdiv(m, rows) * cdiv(n, columns) >= MULTIPROCESSORS]
    return {
        "scheme": scheme.name,
        "bm": rows,
        "bn": fills[0] if fills else 32,
        "bk": step_along_k(scheme, 64),
        "warps": rows // 16,
        "stages": 4,
    }


def aot_dense(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the dense kernel."""
    return [case for case in aot(target, config) if case.name.startswith("dense")]


def aot_quantized(target: Target) -> list[AotCase]:
    """What the compile matrix builds of the weight-only kernel."""
    return [case for case in aot(target, config) if not case.name.startswith("dense")]


KERNELS = tuple(
    Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.linear.triton:launch",
        aot=f"{__name__}:aot_{'dense' if layout == 'dense_v1' else 'quantized'}",
        requires=Requirement(code="triton"),
        summary=summary,
        accepts=accepts,
        config=config,
        layouts=(layout,),
        batch_invariant=True,
        priority=20,
    )
    for name, layout, accepts, summary in (
        (
            "linear_invariant_triton",
            "dense_v1",
            accepts_dense,
            "tiles of tl.dot, one matrix instruction for all M",
        ),
        (
            "linear_w_invariant_triton",
            "plain_v1",
            accepts_quantized,
            "codes decoded by integer arithmetic, one matrix instruction for all M",
        ),
    )
)
