"""All-reduce: every rank's x becomes the sum of the x of all ranks, in place.

This is what completes a product whose inner dimension is shared by ranks (tensor parallelism, Shoeybi et al., 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.collective.groups import gathered, group_of
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, group: str, world: int) -> None:
    """x [M, N] of each of the `world` ranks of `group` becomes their sum, in float32, in rank order, rounded once.

    group: a name in `gristmill.kernels.collective.groups`; not used with a world of one, whose sum is x. Every rank calls with the
    same shape.
    """
    first, *others = gathered(x, group, world)
    total = first.float()
    for other in others:
        total += other.float()
    x.copy_(total)


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | str | int]:
    """Values that differ between ranks, in rows of very different sizes."""
    (m, n), world = problem.integers("m", "n"), problem.integer("world")
    group, rank = group_of(world)
    draw = Draw(problem, seed * world + rank, device)
    return [*draw.stored(draw.rows(m, n)), group, world]


def cost(problem: Problem) -> Cost:
    """x of this rank read and written once. What moves between devices depends on the algorithm."""
    m, n, world = problem.integers("m", "n", "world")
    return Cost(bytes=2 * m * n * ITEM_BYTES[problem.text("x")], flops=(world - 1) * m * n, unit="fp32")


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """The largest |Δ| over the sum of the magnitudes that were added. A collective call: every rank computes it."""
    x, group, world = arguments
    size = gathered(x, group, world).double().abs().sum(0)
    if not size.numel():
        return 0.0
    delta = (outputs[0].double() - references[0].double()).abs()
    return float((delta / size.clamp_min(1e-30)).max())


def tolerance(problem: Problem) -> Tolerance:
    """One rounding step of the dtype per rank: algorithms may add in it."""
    step = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-8}[problem.text("x")]
    return Tolerance("relative", min(0.04, step * problem.integer("world")))


OP = Op(
    name="all_reduce",
    family="collective",
    summary="the sum of x over all ranks, in place",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("world", "int", "ranks", minimum=1),
        Axis("x", "dtype", "dtype of x", default="bf16", choices=FLOATS),
    ),
    arguments=(Tensor("x", "m n", mutable=True), Scalar("group", "str"), Scalar("world", "int", minimum=1)),
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    error=error,
    bucket="m",
    ranks="world",
    examples=problems(
        "m=0,n=64,world=1  m=1,n=1,world=1,x=fp32  m=7,n=257,world=1  m=33,n=768,world=1,x=fp16"
    ),
    bench=problems("m=1,n=4096,world=1  m=256,n=4096,world=1"),
)
