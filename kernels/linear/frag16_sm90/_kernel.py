"""Specs of the kernels over frag16 tiles, from the table of instances: one kernel per schedule and bits per code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace, no_workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90.instances import Format, Schedule

Ranked = Callable[[Format, int, int, int, int], tuple[tuple[float, dict[str, int]], ...]]
Misfit = Callable[[Format, Config, int, int], str | None]
Expected = Callable[[Format, Config, int, int, int, int], float]


class Family(NamedTuple):
    """The kernels of one schedule.

    Attributes:
        ranked: configurations by the cost model, best first, for (format, m, n, k, multiprocessors).
        tried: how many of them tuning tries.
        misfit: why a configuration does not run (format, configuration, m, k), None if it does.
        rows: maximum rows of x.
        expected: microseconds of one configuration by the cost model, for (format, configuration, m, n, k, multiprocessors).
        gates: whether a kernel computes silu(gate) * up for N rows of W itself; otherwise, or None, that is a launch of its own.
        summary: a format string with a placeholder for the weights.
    """

    schedule: Schedule
    ranked: Ranked
    tried: int
    misfit: Misfit
    rows: int | None
    summary: str
    priority: int
    workspace: Callable[[Problem, Config], Workspace] = no_workspace
    expected: Expected | None = None
    gates: Callable[[int], bool] | None = None


LAUNCH, BYTES = 2.0, 4.1e6
"""Microseconds of silu(gate) * up in a launch of its own, at least, and bytes a microsecond on an H200: 5.4 for 256 x 28672, 176 for 8192 x 28672
(bench/results/h200/engine_llama3_8b_int4.json)."""


def kernel(name: str, family: Family, bits: int) -> Kernel:
    """The spec of the kernel of a family that multiplies weights of `bits` bits."""

    def accepts(problem: Problem) -> str | None:
        scheme = QuantScheme.parse(problem.text("w"))
        form = family.schedule.format_of(scheme)
        if form is None or form.bits != bits:
            known = ", ".join(name for form in _formats(family, bits) for name in form.schemes)
            return f"multiplies weight-only formats of {bits} bits, not {scheme}; it is compiled for {known}"
        if problem.text("x") not in ("fp16", "bf16"):
            return f"takes fp16 or bf16 activations, not {problem.text('x')}"
        if family.rows is not None and problem.integer("m") > family.rows:
            return f"made for M <= {family.rows}, not {problem.integer('m')}"
        return None

    def form(problem: Problem) -> Format:
        known = family.schedule.format_of(QuantScheme.parse(problem.text("w")))
        if known is None:
            raise ValueError(f"{name}: {accepts(problem)}")
        return known

    def ranked(problem: Problem, target: Target) -> tuple[tuple[float, dict[str, int]], ...]:
        m, n, k = (problem.integer(axis) for axis in "mnk")
        return family.ranked(form(problem), max(m, 1), n, k, target.multiprocessors or 132)

    def first(problem: Problem, target: Target, count: int) -> list[Config]:
        weight_format = form(problem)
        return [
            {"format": weight_format.name, "tile_bytes": weight_format.tile_bytes, **candidate}
            for _, candidate in ranked(problem, target)[:count]
        ]

    def sources(problem: Problem) -> tuple[str, ...]:
        weight_format = form(problem)
        return (f"linear_{weight_format.name}_{family.schedule.name}_sm90",) if weight_format.rare else ()

    def space(problem: Problem, target: Target) -> Iterable[Config]:
        return first(problem, target, family.tried)

    def config(problem: Problem, target: Target) -> Config:
        # Called for every candidate of a selection: only one configuration is computed.
        return first(problem, target, 1)[0]

    def misfit(problem: Problem, config: Config) -> str | None:
        m, k = problem.integers(*"mk")
        return family.misfit(form(problem), config, m, k)

    def gating(problem: Problem) -> float:
        m, n = problem.integers("m", "n")
        if "silu_mul" not in problem.flags("epilogue") or (family.gates is not None and family.gates(n)):
            return 0.0
        return max(LAUNCH, 3 * m * n / BYTES)  # gate and up are read, half as much is written

    def estimate(problem: Problem, target: Target) -> float | None:
        # Microseconds on a Hopper with HBM3e.
        return ranked(problem, target)[0][0] + (2.0 if problem["act_order"] else 0.0) + gating(problem)

    def estimate_config(problem: Problem, config: Config, target: Target) -> float | None:
        if family.expected is None:
            return None
        m, n, k = (problem.integer(axis) for axis in "mnk")
        found = family.expected(form(problem), config, max(m, 1), n, k, target.multiprocessors or 132)
        return found + gating(problem)

    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target=f"gristmill.kernels.linear.frag16_sm90._launch_{family.schedule.name}:launch",
        requires=Requirement(
            features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"
        ),
        summary=family.summary.format(f"{bits}-bit weights"),
        accepts=accepts,
        config=config,
        space=space,
        misfit=misfit,
        workspace=family.workspace,
        sources=sources,
        estimate=estimate,
        estimate_config=None if family.expected is None else estimate_config,
        layouts=tuple(dict.fromkeys(form.layout for form in _formats(family, bits))),
        waits=True,
        triggers=True,
        priority=family.priority,
        proven="sm_90: H200",
    )


def _formats(family: Family, bits: int) -> list[Format]:
    return [form for form in family.schedule.formats if form.bits == bits]
