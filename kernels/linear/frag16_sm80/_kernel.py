"""Specs of the kernels over frag16 tiles for sm_80 and newer, by schedule and family of formats: PTX, which the driver compiles for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of

PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""
TRIED = 16
"""Configurations that tuning tries."""


class Family(NamedTuple):
    """Formats that one kernel multiplies: `name` is part of its name, `summary` and `formats` of what it says, `layouts` hold them."""

    name: str
    summary: str
    formats: str
    layouts: tuple[str, ...]


W4 = Family("w4a16", "4-bit weights", "formats of 4 bits", ("w4_frag16_v1", "f4_frag16_v1"))
W8 = Family("w8a16", "8-bit weights", "formats of 8 bits", ("w8_frag16_v1",))
GGUF = Family("gguf", "GGUF's groups of 4 to 6 bits", "GGUF's formats", ("gguf_frag16_v1",))


class Schedule(NamedTuple):
    """A schedule.

    Attributes:
        name: of its sources and its launcher.
        ranked: configurations by its model, best first, for (format, m, n, k, multiprocessors).
        workspace_bytes: for (n, configuration).
        rows: maximum rows of x.
        summary: a format string with a placeholder for the weights.
        examples: by names of families.
        misfit: why a configuration does not run m rows of x, None if it does.
    """

    name: str
    ranked: Callable[[Format, int, int, int, int], tuple[tuple[float, dict[str, int]], ...]]
    workspace_bytes: Callable[[int, Config], int]
    rows: int | None
    summary: str
    priority: int
    examples: Mapping[str, tuple[str, ...]]
    misfit: Callable[[int, Config], str | None] = lambda m, config: None


def kernel(schedule: Schedule, family: Family) -> Kernel:
    """The spec of the kernel of a schedule that multiplies weights of a family."""
    name = f"linear_{family.name}_{schedule.name}_sm80"
    forms = [form for form in FORMATS if form.layout in family.layouts]

    def accepts(problem: Problem) -> str | None:
        scheme = QuantScheme.parse(problem.text("w"))
        if format_of(scheme) not in forms:
            known = ", ".join(dict.fromkeys(name for form in forms for name in form.schemes))
            return f"multiplies weight-only {family.formats}, not {scheme}; it is compiled for {known}"
        if problem.text("x") not in ("fp16", "bf16"):
            return f"takes fp16 or bf16 activations, not {problem.text('x')}"
        if schedule.rows is not None and problem.integer("m") > schedule.rows:
            return f"made for M <= {schedule.rows}, not {problem.integer('m')}"
        return None

    def form(problem: Problem) -> Format:
        known = format_of(QuantScheme.parse(problem.text("w")))
        if known is None:
            raise ValueError(f"{name}: {accepts(problem)}")
        return known

    def space(problem: Problem, target: Target) -> Iterable[Config]:
        weight, (m, n, k) = form(problem), problem.integers(*"mnk")
        ranked = schedule.ranked(weight, m, n, k, target.multiprocessors or PROCESSORS)
        for _, candidate in ranked[:TRIED]:
            yield {"format": weight.name, "tile_bytes": weight.tile_bytes, **candidate}

    def config(problem: Problem, target: Target) -> Config:
        return next(iter(space(problem, target)))

    def misfit(problem: Problem, config: Config) -> str | None:
        return schedule.misfit(problem.integer("m"), config)

    def workspace(problem: Problem, config: Config) -> Workspace:
        # Counters, zero before a call and after it, then the sums of every part of K.
        size = schedule.workspace_bytes(problem.integer("n"), config)
        return Workspace(size, zeroed=size > 0)

    return Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="cuda",
        target=f"gristmill.kernels.linear.frag16_sm80._launch_{schedule.name}:launch",
        requires=Requirement(
            features=(frozenset({"mma.bf16", "cp_async", "ldmatrix"}),),
            vendors=("nvidia",),
            code="cuda:compute_80",
        ),
        summary=schedule.summary.format(family.summary),
        accepts=accepts,
        config=config,
        space=space,
        misfit=misfit,
        workspace=workspace,
        layouts=family.layouts,
        examples=schedule.examples[family.name],
        priority=schedule.priority,
    )
