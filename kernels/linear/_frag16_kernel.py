"""What the Hopper kernels over frag16 layouts say of themselves: for few rows of x (`FEW`, `FED`)
and for many (`MANY`), of 4-bit and 8-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import frag16_fed_shapes, frag16_shapes, frag16_tma_shapes

Ranked = Callable[[frag16_shapes.Format, int, int, int, int], tuple[tuple[float, dict[str, int]], ...]]


class Family(NamedTuple):
    """launch: in _frag16_launch. ranked: configurations by the cost model, best first; tried: how many of them. rows: the most of x."""

    launch: str
    ranked: Ranked
    tried: int
    rows: int | None
    summary: str
    priority: int


FEW = Family(
    launch="launch",
    ranked=frag16_shapes.ranked,
    tried=64,
    rows=frag16_shapes.ROWS,
    summary="M <= 16: bulk copies into warps' own rings, {} decoded into tensor-core operands, split-K over clusters",
    priority=110,
)
FED = Family(
    launch="launch_fed",
    ranked=frag16_fed_shapes.ranked,
    tried=64,
    rows=frag16_shapes.ROWS,
    summary="M <= 16: a warpgroup copies, {} decoded into tensor-core operands by the others, split-K over clusters",
    priority=109,
)
MANY = Family(
    launch="launch_tma",
    ranked=frag16_tma_shapes.ranked,
    tried=1000,
    rows=None,
    summary="M > 16: warp-specialised, {} decoded into the register operand of wgmma while the product before runs",
    priority=108,
)


def kernel(name: str, family: Family, bits: int, layouts: tuple[str, ...]) -> Kernel:
    """The spec of one kernel."""

    def accepts(problem: Problem) -> str | None:
        scheme = QuantScheme.parse(problem.text("w"))
        if (
            scheme.is_dense
            or scheme.activation is not None
            or scheme.bits != bits
            or scheme.weights == "mxfp8"
        ):
            return (
                f"multiplies weight-only formats of {bits} bits"
                + (" but mxfp8" if bits == 8 else "")
                + f", not {scheme}"
            )
        if problem.text("x") not in ("fp16", "bf16"):
            return f"takes fp16 or bf16 activations, not {problem.text('x')}"
        if family.rows is not None and problem.integer("m") > family.rows:
            return f"made for M <= {family.rows}, not {problem.integer('m')}"
        return None

    def form(problem: Problem) -> frag16_shapes.Format:
        return frag16_shapes.format_of(QuantScheme.parse(problem.text("w")))

    def found(problem: Problem, target: Target) -> tuple[tuple[float, dict[str, int]], ...]:
        m, n, k = (problem.integer(axis) for axis in "mnk")
        return family.ranked(form(problem), max(m, 1), n, k, target.multiprocessors or 132)

    def first(problem: Problem, target: Target, count: int) -> list[Config]:
        of = form(problem)
        return [
            {"format": of.name, "tile_bytes": of.tile_bytes, **one}
            for _, one in found(problem, target)[:count]
        ]

    def space(problem: Problem, target: Target) -> Iterable[Config]:
        return first(problem, target, family.tried)

    def config(
        problem: Problem, target: Target
    ) -> Config:  # asked of every candidate of a selection: one, not the space
        return first(problem, target, 1)[0]

    def estimate(problem: Problem, target: Target) -> float | None:  # microseconds on a Hopper with HBM3e
        return found(problem, target)[0][0] + (2.0 if problem["act_order"] else 0.0)

    def workspace(
        problem: Problem, config: Config
    ) -> Workspace:  # partial sums, where tiles are dealt out along K
        dealt = family is MANY and bool(config["even"])
        return Workspace(frag16_tma_shapes.scratch_bytes(config) if dealt else 0, zeroed=dealt)

    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target=f"gristmill.kernels.linear._frag16_launch:{family.launch}",
        requires=Requirement(
            features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"
        ),
        summary=family.summary.format(f"{bits}-bit weights"),
        accepts=accepts,
        config=config,
        space=space,
        workspace=workspace,
        estimate=estimate,
        layouts=layouts,
        waits=True,
        triggers=True,
        priority=family.priority,
        proven="sm_90: H200",
    )
