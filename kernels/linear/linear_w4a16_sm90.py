"""Weight-only linear of 4-bit weights in CUDA C++ for Hopper at small M (`_linear_w4a16_sm90.cuh`), over frag16 tiles.

int4 in groups of 32, 64, 128 or a row, with or without zero points, act-order included; mxfp4 and nvfp4. Limited by memory at
M <= 4 and by decoding above; docs/performance/linear_weight_only.md has the measurements, and what was tried. The sums of a
cluster's CTAs meet in a fixed order: results are bitwise repeatable, and independent of the other rows of the batch within one
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_shapes import ROWS, format_of, ranked


def accepts(problem: Problem) -> str | None:
    """4-bit weights with half-precision activations of at most 16 rows."""
    return refusal(problem, bits=4)


def refusal(problem: Problem, bits: int) -> str | None:
    """Why the decode kernels of weights of so many bits do not take a problem."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.is_dense or scheme.activation is not None or scheme.bits != bits or scheme.weights == "mxfp8":
        return f"multiplies weight-only formats of {bits} bits" + (" but mxfp8" if bits == 8 else "") + f", not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    if problem.integer("m") > ROWS:
        return f"made for M <= {ROWS}, not {problem.integer('m')}"
    return None


def _found(problem: Problem, target: Target) -> tuple[tuple[float, dict[str, int]], ...]:
    m, n, k = (problem.integer(axis) for axis in "mnk")
    scheme = QuantScheme.parse(problem.text("w"))
    return ranked(format_of(scheme), problem.text("x"), m, n, k, target.multiprocessors or 132)


def _complete(problem: Problem, config: dict[str, int]) -> Config:
    form = format_of(QuantScheme.parse(problem.text("w")))
    return {"format": form.name, "tile_bytes": form.tile_bytes, **config}


def config(problem: Problem, target: Target) -> Config:
    """The candidate that the cost model likes best."""
    return _complete(problem, _found(problem, target)[0][1])


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The candidates that the cost model likes best."""
    return [_complete(problem, found) for _, found in _found(problem, target)[:64]]


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds by the cost model, on a Hopper with HBM3e."""
    gather = 2.0 if problem["act_order"] else 0.0
    return _found(problem, target)[0][0] + gather


def kernel(
    name: str,
    what: str,
    layouts: tuple[str, ...],
    sources: tuple[str, ...],
    takes: Callable[[Problem], str | None],
) -> Kernel:
    """The spec of a decode kernel over frag16 layouts; `takes` is its `accepts`."""
    shared = ("_frag16_launch.py", "_linear_frag16_entry_sm90.h", "_linear_w4a16_sm90.cuh", "_weight_tiles_sm90.cuh",
              "_w4_frag16_sm90.cuh", "_fp4_sm90.cuh", "_gather_columns_sm90.cu")  # fmt: skip
    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.linear._frag16_launch:launch",
        requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
        summary=f"M <= 16: bulk copies into warps' own rings, {what} decoded into tensor-core operands, split-K over clusters",
        accepts=takes,
        config=config,
        space=space,
        estimate=estimate,
        layouts=layouts,
        sources=(*sources, *shared),
        waits=True,
        triggers=True,
        priority=110,
        proven="sm_90: H200",
    )


KERNEL = kernel(
    "linear_w4a16_sm90",
    "4-bit weights",
    ("w4_frag16_v1", "f4_frag16_v1"),
    tuple(
        f"_linear_w4a16_{form}_sm90.cu"
        for form in ("int4_g128", "int4_g64", "int4_g32", "int4_g128_zp", "int4_g64_zp", "int4_g32_zp", "mxfp4", "nvfp4")
    ),
    accepts,
)
