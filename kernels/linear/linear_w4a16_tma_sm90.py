"""Weight-only linear of 4-bit weights in CUDA C++ for Hopper at M > 16 (`_linear_frag16_tma_sm90.cuh`), over frag16 tiles.

Warp-specialised: two threads copy, the other warpgroups decode weights into wgmma's register operand. Weights are rounded to x's type
once they are scaled. What does not fill the machine evenly is dealt out along K, its sums added in a fixed order: results are bitwise
repeatable. docs/performance/linear_weight_only_large_m.md has the measurements, and what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_shapes import format_of
from gristmill.kernels.linear.frag16_tma_shapes import ranked, scratch_bytes


def accepts(problem: Problem) -> str | None:
    """4-bit weights with half-precision activations."""
    return refusal(problem, bits=4)


def refusal(problem: Problem, bits: int) -> str | None:
    """Why the many-row kernels of weights of so many bits do not take a problem."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.is_dense or scheme.activation is not None or scheme.bits != bits or scheme.weights == "mxfp8":
        return f"multiplies weight-only formats of {bits} bits" + (" but mxfp8" if bits == 8 else "") + f", not {scheme}"
    if problem.text("x") not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {problem.text('x')}"
    return None


def workspace(problem: Problem, config: Config) -> Workspace:
    """Room for partial sums, where tiles are dealt out along K."""
    return Workspace(scratch_bytes(config), zeroed=bool(config["even"]))


def _found(problem: Problem, target: Target) -> tuple[tuple[float, dict[str, int]], ...]:
    m, n, k = (problem.integer(axis) for axis in "mnk")
    form = format_of(QuantScheme.parse(problem.text("w")))
    return ranked(form, problem.text("x"), max(m, 1), n, k, target.multiprocessors or 132)


def _complete(problem: Problem, config: dict[str, int]) -> Config:
    form = format_of(QuantScheme.parse(problem.text("w")))
    return {"format": form.name, "tile_bytes": form.tile_bytes, **config}


def config(problem: Problem, target: Target) -> Config:
    """The candidate that the cost model likes best."""
    return _complete(problem, _found(problem, target)[0][1])


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The candidates, in the order of the cost model."""
    return [_complete(problem, found) for _, found in _found(problem, target)]


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds by the cost model, on a Hopper with HBM3e."""
    return _found(problem, target)[0][0] + (2.0 if problem["act_order"] else 0.0)


def kernel(
    name: str, what: str, layouts: tuple[str, ...], sources: tuple[str, ...], takes: Callable[[Problem], str | None]
) -> Kernel:
    """The spec of a many-row kernel over frag16 layouts; `takes` is its `accepts`."""
    shared = ("_frag16_launch.py", "_linear_frag16_tma_entry_sm90.h", "_linear_frag16_tma_sm90.cuh", "_tiles_of_y_sm90.cuh",
              "_wgmma_weights_sm90.cuh", "_wgmma_rs_sm90.cuh", "_weight_tiles_sm90.cuh", "_w4_frag16_sm90.cuh", "_fp4_sm90.cuh",
              "_gather_columns_sm90.cu")  # fmt: skip
    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target="gristmill.kernels.linear._frag16_launch:launch_tma",
        requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
        summary=f"M > 16: warp-specialised, {what} decoded into the register operand of wgmma while the product before runs",
        accepts=takes,
        config=config,
        space=space,
        workspace=workspace,
        estimate=estimate,
        layouts=layouts,
        sources=(*sources, *shared),
        waits=True,
        triggers=True,
        priority=108,
        proven="sm_90: H200",
    )


KERNEL = kernel(
    "linear_w4a16_tma_sm90",
    "4-bit weights",
    ("w4_frag16_v1", "f4_frag16_v1"),
    tuple(
        f"_linear_w4a16_{form}_tma_sm90.cu"
        for form in ("int4_g128", "int4_g64", "int4_g32", "int4_g128_zp", "int4_g64_zp", "int4_g32_zp", "mxfp4", "nvfp4")
    ),
    accepts,
)
