"""All-gather of columns: every rank gets the columns of all ranks, in rank order. Logits of a vocabulary that ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.collective.groups import gathered, group_of
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, group: str, world: int, out: torch.Tensor) -> None:
    """out [M, world * N] becomes the x [M, N] of the `world` ranks of `group` beside each other, that of rank 0 first.

    group: a name in `gristmill.kernels.collective.groups`; not used with a world of one. Every rank calls with the same shape.
    """
    out.view(x.shape[0], world, x.shape[1]).copy_(gathered(x, group, world).transpose(0, 1))


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | str | int]:
    """Values that differ between ranks, and a poisoned output."""
    import torch

    (m, n), world = problem.integers("m", "n"), problem.integer("world")
    group, rank = group_of(world)
    draw = Draw(problem, seed * world + rank, device)
    x, out = draw.stored(draw.normal(m, n), torch.full((m, world * n), torch.nan, dtype=torch.float32))
    return [x, group, world, out]


def cost(problem: Problem) -> Cost:
    """x of this rank read once, the result written once."""
    m, n, world = problem.integers("m", "n", "world")
    return Cost(bytes=(1 + world) * m * n * ITEM_BYTES[problem.text("x")], flops=0, unit="fp32")


OP = Op(
    name="all_gather",
    family="collective",
    summary="the columns of all ranks, in rank order",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "columns of one rank", minimum=1),
        Axis("world", "int", "ranks", minimum=1),
        Axis("x", "dtype", "dtype of x and out", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("x", "m n"),
        Scalar("group", "str"),
        Scalar("world", "int", minimum=1),
        Tensor("out", "m world*n", mutable=True),
    ),
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="m",
    ranks="world",
    examples=problems(
        "m=0,n=64,world=1  m=1,n=1,world=1,x=fp32  m=7,n=257,world=1  m=33,n=768,world=1,x=fp16"
    ),
    bench=problems("m=1,n=64128,world=1  m=64,n=64128,world=1"),
)
