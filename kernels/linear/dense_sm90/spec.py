"""Dense products of at most 16 rows of x on Hopper, in one launch: bias, gating and residual included.

Limited by reading W once. W goes from memory to the registers of mma.m16n8k16 without shared memory, its first loads before the
previous kernel has ended; warps and the CTAs of a cluster share K and add their sums in a fixed order.
docs/performance/linear_dense.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target

MOST_ROWS, ROWS, STEP = 16, 16, 64
"""Rows of x; rows of W of a tile, and columns of it that a warp multiplies at a time."""
REGISTERS = 65536
"""Of a multiprocessor."""
_REGISTERS = {(1, 1): 128, (1, 2): 120, (2, 1): 144, (2, 2): 152}
"""Of a thread, by columns of x in eights and tiles of a warp."""


def accepts(problem: Problem) -> str | None:
    """At most 16 rows of x, in the dtype of the weight, and rows of whole 16-byte words."""
    dtype, weight = problem.text("x"), QuantScheme.parse(problem.text("w"))
    if dtype not in ("fp16", "bf16") or str(weight) != dtype:
        return f"multiplies fp16 by fp16 or bf16 by bf16, not {dtype} by {weight}"
    if problem.integer("m") > MOST_ROWS:
        return f"made for M <= {MOST_ROWS}, not {problem.integer('m')}"
    if problem.integer("k") % 8 or problem.integer("k") == 0:
        return f"reads 8 columns at a time, K = {problem.integer('k')} is not a multiple"
    return None


def configs(problem: Problem) -> list[dict[str, int]]:
    """What fits: tiles of a warp, warps and CTAs along K, each with a step of K at least."""
    steps = cdiv(problem.integer("k"), STEP)
    return [
        {"rt": rt, "wk": wk, "split": split}
        for rt in (1, 2)
        for wk in (1, 2, 4, 8)
        for split in (1, 2, 4, 8)
        if wk * split <= steps or wk * split == 1
    ]


def microseconds(problem: Problem, target: Target, config: dict[str, int]) -> float:
    """Expected time of a launch.

    Its terms are fitted to 2,080 times on an H200, every configuration of 65 problems (bench/results/h200/linear_dense.json): the
    configuration that it ranks first is 3 % slower than the best on average, 19 % at most.
    """
    m, n, k = (problem.integer(axis) for axis in "mnk")
    rt, wk, split = config["rt"], config["wk"], config["split"]
    columns = 2 if m > 8 else 1
    processors = target.multiprocessors or 132
    ctas = cdiv(n, ROWS * rt) * split
    room = REGISTERS // (32 * _REGISTERS[columns, rt]) // wk
    busiest = cdiv(ctas, processors)
    steps = cdiv(cdiv(k, STEP), wk * split)
    weights = ROWS * rt * wk * steps * STEP * 2
    x = min(m, 8 * columns) * wk * steps * STEP * 2
    in_flight = min(busiest, room) * wk * min(steps, 4 // rt) * rt * ROWS * STEP * 2
    rounds = cdiv(busiest, room)
    parts = (
        0.0424 * rounds * steps * rt * columns**0.5,
        busiest * (weights + 1.24 * x) / 119.9e3,
        n * k * 2 / 4.82e6,
        0.968 * busiest * weights / in_flight,
    )
    power = 1.454
    return (
        0.09 + 0.476 * log2(split) + 0.675 * rounds + float(sum(part**power for part in parts) ** (1 / power))
    )


def ranked(problem: Problem, target: Target) -> list[tuple[float, dict[str, int]]]:
    costs = [(microseconds(problem, target, config), config) for config in configs(problem)]
    return sorted(costs, key=lambda pair: pair[0])


def config(problem: Problem, target: Target) -> Config:
    return ranked(problem, target)[0][1]


def space(problem: Problem, target: Target) -> Iterable[Config]:
    return [candidate for _, candidate in ranked(problem, target)]


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds on an H200."""
    return ranked(problem, target)[0][0]


KERNEL = Kernel(
    op="linear",
    name="linear_dense_decode_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.linear.dense_sm90._launch:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="M <= 16: dense weights from memory to tensor-core registers, split-K over warps and clusters, fused epilogue",
    accepts=accepts,
    config=config,
    space=space,
    estimate=estimate,
    layouts=("dense_v1",),
    waits=True,
    triggers=True,
    priority=110,
    proven="sm_90: H200",
)
