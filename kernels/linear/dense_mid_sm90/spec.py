"""Dense products of a few dozen rows of x on Hopper, in one launch: bias, gating and residual included.

Limited by reading W once. TMA copies W and x to rings in shared memory, warpgroups multiply 64 rows of W each, and the CTAs of
a cluster share K and add their sums in a fixed order. docs/performance/linear_dense.md has the design.

It has no estimate, and ranks below the product of torch: it is selected where times say that it is faster.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target

MOST_ROWS, STEP, BLOCK = 128, 64, 64
"""Rows of x; columns of a slot of the ring; rows of W of a warpgroup."""
WIDTHS, ROWS, SPLITS = (16, 32, 64, 128), (64, 128, 192, 256), (1, 2, 3, 4, 5, 6, 8)
"""Rows of x and of W of the instances; CTAs of a cluster."""
CTAS = {64: 4, 128: 3, 192: 2, 256: 1}
"""Of a multiprocessor at most, by rows of W: rings of three slots or more for 64 rows of x."""
PROCESSORS, PART = 132, 16
"""Multiprocessors of an H200, and of the smallest of the parts that clusters stay in."""
PROCESSOR_KB, MOST_SLOTS = 228, 64


def width_of(m: int) -> int:
    """Rows of x of the narrowest instance that holds `m`."""
    return next(width for width in WIDTHS if width >= m)


def slots(m: int, rows: int, ctas: int) -> int:
    """Slots of a ring where `ctas` CTAs share a multiprocessor, each beside a KB of the driver's and one of barriers."""
    return min(MOST_SLOTS, (PROCESSOR_KB // ctas - 2) * 1024 // ((rows + width_of(m)) * STEP * 2))


def accepts(problem: Problem) -> str | None:
    """At most 128 rows of x, in the dtype of the weight, and rows of whole 16-byte words."""
    dtype, weight = problem.text("x"), str(QuantScheme.parse(problem.text("w")))
    if dtype not in ("fp16", "bf16") or weight != dtype:
        return f"multiplies fp16 by fp16 or bf16 by bf16, not {dtype} by {weight}"
    m, k = problem.integers("m", "k")
    if m > MOST_ROWS:
        return f"made for M <= {MOST_ROWS}, not {m}"
    return f"reads 8 columns at a time, K = {k} is not a multiple" if k % 8 or k == 0 else None


def configs(problem: Problem, processors: int = PROCESSORS) -> list[dict[str, int]]:
    """Rows of W of a CTA, CTAs along K, each with a slot at least, and CTAs that a ring leaves a multiprocessor's memory to.

    One more than there are, so that CTAs of the next launch fit beside the last ones of this.
    """
    n, steps = problem.integer("n"), cdiv(problem.integer("k"), STEP)
    return [
        {"rows": rows, "split": split, "ctas": ctas}
        for rows in ROWS
        for split in SPLITS
        if split <= steps
        for ctas in range(1, min(CTAS[rows], cdiv(cdiv(n, rows) * split, processors) + 1) + 1)
    ]


def microseconds(problem: Problem, config: Config, target: Target) -> float:
    """Expected time of a launch, from rates of other kernels on an H200; not fitted to times of this one.

    Bytes are read from memory at 4.4 TB/s, from L2 at 5.8, and by one multiprocessor at 80 GB/ms; a ring is filled once in 1.1 us.
    """
    m, n, k = (problem.integer(axis) for axis in "mnk")
    rows, split, ctas = (int(config[name]) for name in ("rows", "split", "ctas"))
    processors, width = target.multiprocessors or PROCESSORS, width_of(max(m, 1))
    tiles, steps = cdiv(n, rows), cdiv(k, STEP)
    launched, each = tiles * split, cdiv(steps, split)
    fitting = processors * ctas if split == 1 else PART * ctas // split * split * (processors // PART)
    rounds, busiest = cdiv(launched, fitting), cdiv(launched, processors)
    w_slot, x_slot = rows * STEP * 2, m * STEP * 2
    product = (
        4 * max(width / 2, 16 + width / 4) * rows / BLOCK / 1.7e3
    )  # of a slot: cycles of tensor cores, or of their operands
    parts = (
        n * k * 2 / 4.4e6,
        tiles * steps * (w_slot + x_slot) / 5.8e6,
        busiest * each * (w_slot + x_slot) / 80e3,
        busiest * each * product,
        1.1 * busiest * each / (min(busiest, ctas) * min(each, slots(m, rows, ctas))),
    )
    sums = rows * m * 4
    end = sums / 200e3 + (sums / 60e3 + 0.5 if split > 1 else 0.0)
    return float(0.4 + 0.3 * rounds + end * rounds**0.5 + sum(part**4 for part in parts) ** 0.25)


def ranked(problem: Problem, target: Target) -> list[tuple[float, dict[str, int]]]:
    found = configs(problem, target.multiprocessors or PROCESSORS)
    costs = [(microseconds(problem, config, target), config) for config in found]
    return sorted(costs, key=lambda pair: pair[0])


def config(problem: Problem, target: Target) -> Config:
    return ranked(problem, target)[0][1]


def space(problem: Problem, target: Target) -> Iterable[Config]:
    return [candidate for _, candidate in ranked(problem, target)]


KERNEL = Kernel(
    op="linear",
    name="linear_dense_mid_sm90",
    provider="gristmill",
    language="cuda",
    target="gristmill.kernels.linear.dense_mid_sm90._launch:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="M <= 128: dense weights by TMA through rings in shared memory to wgmma, split-K over clusters, fused epilogue",
    accepts=accepts,
    config=config,
    space=space,
    estimate_config=microseconds,
    layouts=("dense_v1",),
    waits=True,
    triggers=True,
    priority=58,  # below torch's product
)
