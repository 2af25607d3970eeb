"""All-reduce, residual addition and RMSNorm in one: what stands between the blocks of a pre-norm decoder that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.collective import all_reduce
from gristmill.kernels.collective.groups import gathered, group_of
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.norm import fused_add_rms_norm
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: str, world: int
) -> torch.Tensor:
    """`all_reduce` of x [M, N], then `fused_add_rms_norm` of the sum: residual [M, N] becomes sum + residual; returns its norm [M, N].

    The sum is rounded to the dtype before it is added, so that the result is that of the two operations in turn. Residual and weight
    [N] are the same on every rank. The output may be x itself.
    """
    total = x.clone()
    all_reduce.reference(total, group, world)
    return fused_add_rms_norm.reference(total, residual, weight, eps)


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | float | str | int]:
    """x that differs between ranks, in rows of very different sizes; residual and weight that do not."""
    (m, n), world = problem.integers("m", "n"), problem.integer("world")
    group, rank = group_of(world)
    own, shared = Draw(problem, (seed + 1) * (world + 1) + rank, device), Draw(problem, seed, device)
    x = own.stored(own.rows(m, n))[0]
    residual, weight = shared.stored(shared.rows(m, n), 1 + 0.2 * shared.normal(n))
    return [x, residual, weight, 1e-5, group, world]


def cost(problem: Problem) -> Cost:
    """x and the residual read once, the residual and the output written once, the weight read once."""
    (m, n), world = problem.integers("m", "n"), problem.integer("world")
    item = ITEM_BYTES[problem.text("x")]
    return Cost(bytes=(4 * m * n + n) * item, flops=(world + 4) * m * n, unit="fp32")


def error(
    problem: Problem,
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, str, int],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """The largest |Δ| over the sum of the magnitudes that were added; that of the norm scaled as the norm scales. A collective call."""
    x, residual, weight, eps, group, world = arguments
    size = gathered(x, group, world).double().abs().sum(0) + residual.double().abs()
    if not size.numel():
        return 0.0
    normed, stored = references  # then the arguments that are written
    scale = (stored.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double().abs()
    return max(
        float(((out.double() - ref.double()).abs() / bound.clamp_min(1e-30)).max())
        for out, ref, bound in zip(outputs, (normed, stored), (size * scale, size), strict=True)
    )


def tolerance(problem: Problem) -> Tolerance:
    """That of the norm; from three ranks on, also one rounding step of the dtype per rank: algorithms may add in it. The sum of two is
    rounded once by all of them.
    """
    x = problem.text("x")
    norm = fused_add_rms_norm.OP.tolerance(fused_add_rms_norm.OP.problem(f"m=1,n=1,x={x}")).limit
    step = all_reduce.OP.tolerance(all_reduce.OP.problem(f"m=1,n=1,world=1,x={x}")).limit
    world = problem.integer("world")
    return Tolerance("relative", min(0.04, norm + step * world) if world > 2 else norm)


OP = Op(
    name="all_reduce_add_rms_norm",
    family="collective",
    summary="residual += the sum of x over all ranks, then RMSNorm of the stored residual",
    axes=(
        Axis("m", "int", "rows (tokens)", dynamic=True),
        Axis("n", "int", "row length (hidden size)", minimum=1),
        Axis("world", "int", "ranks", minimum=1),
        Axis("x", "dtype", "dtype of x, residual, weight and the output", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("x", "m n"),
        Tensor("residual", "m n", mutable=True),
        Tensor("weight", "n"),
        Scalar("eps", "float", minimum=0),
        Scalar("group", "str"),
        Scalar("world", "int", minimum=1),
    ),
    returns=(Tensor("out", "m n"),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    error=error,
    bucket="m",
    ranks="world",
    examples=all_reduce.OP.examples,
    bench=all_reduce.OP.bench,
)
