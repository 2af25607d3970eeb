"""All-to-all: every rank gets the columns that each rank has for it, in rank order. Partial attentions of a shared context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.collective.groups import gathered, group_of, rank_in
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, group: str, world: int, out: torch.Tensor) -> None:
    """out[:, s] of rank r becomes x[:, r] of rank s; both are [M, world, N].

    group: a name in `gristmill.kernels.collective.groups`; not used with a world of one. Every rank calls with the same shape.
    """
    out.copy_(gathered(x, group, world)[:, :, rank_in(group, world)].transpose(0, 1))


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | str | int]:
    """Values that differ between ranks, and a poisoned output."""
    import torch

    (m, n), world = problem.integers("m", "n"), problem.integer("world")
    group, rank = group_of(world)
    draw = Draw(problem, seed * world + rank, device)
    poison = torch.full((m, world, n), torch.nan, dtype=torch.float32)
    x, out = draw.stored(draw.normal(m, world, n), poison)
    return [x, group, world, out]


def cost(problem: Problem) -> Cost:
    """x and the result, once each."""
    m, n, world = problem.integers("m", "n", "world")
    return Cost(bytes=2 * world * m * n * ITEM_BYTES[problem.text("x")], flops=0, unit="fp32")


OP = Op(
    name="all_to_all",
    family="collective",
    summary="the columns that each rank has for this one, in rank order",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "columns from one rank to another", minimum=1),
        Axis("world", "int", "ranks", minimum=1),
        Axis("x", "dtype", "dtype of x and out", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("x", "m world n"),
        Scalar("group", "str"),
        Scalar("world", "int", minimum=1),
        Tensor("out", "m world n", mutable=True),
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
    bench=problems("m=1,n=2112,world=1  m=64,n=2112,world=1"),
)
