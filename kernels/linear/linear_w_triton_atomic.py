"""Weight-only linear in Triton for few rows: K split over programs, whose sums meet by atomic additions, for every device Triton reaches.

The other kernels for few rows add in a fixed order, and are bitwise repeatable; this one is not. It has run in Triton's interpreter alone,
so it runs only when a policy pins it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.linear_triton import accepts_quantized
from gristmill.kernels.linear.linear_triton import config as whole_config
from gristmill.kernels.linear.linear_triton import space as whole_space

ROWS = 64
"""Of x, at most: sums are written and read once per program, in float32."""
PROGRAMS = 4
"""A multiprocessor, of which there are enough for that many."""


def accepts(problem: Problem) -> str | None:
    """Weight-only schemes that have a name of their own, few rows of x."""
    if reason := accepts_quantized(problem):
        return reason
    return None if problem.integer("m") <= ROWS else f"made for M <= {ROWS}, not {problem.integer('m')}"


def config(problem: Problem, target: Target) -> Config:
    """The tiles of linear_w_triton, and as many parts along K as fill the device."""
    return _split(problem, target, whole_config(problem, target))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Its other tiles, with as many parts, half and twice as many."""
    found = []
    for base in whole_space(problem, target):
        split = int(_split(problem, target, base)["split"])
        found += [{**base, "split": parts} for parts in sorted({max(1, split // 2), split, split * 2})]
    return found


def _split(problem: Problem, target: Target, base: Config) -> Config:
    tiles = cdiv(problem.integer("n"), int(base["bn"])) * cdiv(max(1, problem.integer("m")), int(base["bm"]))
    steps = cdiv(problem.integer("k"), int(base["bk"]))
    return {**base, "split": max(1, min(steps, cdiv(PROGRAMS * (target.multiprocessors or 64), tiles)))}


def flag_bytes(m: int, n: int, config: Config) -> int:
    """Bytes of the counters, one per tile; the sums begin after them."""
    return cdiv(4 * prod((cdiv(n, int(config["bn"])), cdiv(m, int(config["bm"])))), 256) * 256


def scratch_bytes(m: int, n: int, config: Config) -> int:
    """Bytes of counters and of sums of m x n, n the rows of the weight. Zero before a call and after it."""
    return flag_bytes(m, n, config) + 4 * m * n


def workspace(problem: Problem, config: Config) -> Workspace:
    return Workspace(scratch_bytes(max(1, problem.integer("m")), problem.integer("n"), config), zeroed=True)


KERNEL = Kernel(
    op="linear",
    name="linear_w_triton_atomic",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.linear._linear_atomic_triton:launch",
    aot="gristmill.kernels.linear._linear_atomic_triton:aot",
    requires=Requirement(code="triton"),
    summary="few rows: K split over programs, sums by atomic additions",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    layouts=("plain_v1",),
    deterministic=False,
    auto=False,
    priority=45,
    proven="Triton's interpreter; not yet on a GPU",
)
