"""Route: the experts of each token with their weights, and the tokens sorted by expert: grouped_topk and permute in one operation.

A kernel may do both in one launch, which saves the launches of `permute` in a layer of experts: `moe` takes the order as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import ROWS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from gristmill.kernels.moe.permute import op as permute

if TYPE_CHECKING:
    import torch


def reference(
    logits: torch.Tensor,
    top_k: int,
    local: int,
    first: int = 0,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """logits [M, E], bias float32 [E] or None -> weights float32 [M, top_k], ids int32 [M, top_k], expert_offsets int32 [local + 1],
    permutation int32 [M * top_k], inverse int32 [M * top_k].

    weights, and ids before `first` is subtracted, are those of `grouped_topk`. So expert e of this rank, which has `local` experts from
    `first` on, has the id e - first, and experts of other ranks have ids outside 0...local - 1. The others are `permute(ids, local)`: place
    p has entry permutation[p] = token * top_k + k, places of an expert are in ascending entry, and inverse is -1 for experts of other
    ranks, whose entries follow those of the last expert.
    """
    weights, ids = grouped_topk.reference(
        logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale
    )
    ids = ids - first
    return weights, ids, *permute.reference(ids, local)


def experts_of_a_rank(e: int, local: int, first: int) -> str | None:
    """Why these are not the experts of a rank; None if they are."""
    end = f"experts from {first} up to {first + local} (first, and local of them) are not among the {e}"
    return None if first + local <= e else end


def check(problem: Problem) -> str | None:
    """Why the axes of `problem` are inconsistent; None if they are not."""
    e, local = problem.integers("e", "local")
    return grouped_topk.check(problem) or experts_of_a_rank(e, local, 0)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Those of grouped_topk; the experts of this rank are in the middle."""
    e, local = problem.integers("e", "local")
    logits, top_k, *rest = grouped_topk.inputs(problem, seed, device)
    return [logits, top_k, local, (e - local + 1) // 2, *rest]


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """The error of weights and ids, as of grouped_topk; infinite when the order is not that of these ids."""
    import torch

    logits, top_k, local, _, *rest = arguments
    order = permute.reference(outputs[1], local)
    if not all(torch.equal(found, expected) for found, expected in zip(outputs[2:], order, strict=True)):
        return math.inf
    return grouped_topk.error(problem, [logits, top_k, *rest], outputs[:2], references[:2])


def cost(problem: Problem) -> Cost:
    """That of grouped_topk, with two lists of entries and the offsets written."""
    choice = grouped_topk.cost(problem)
    entries = problem.integer("m") * problem.integer("top_k")
    return replace(choice, bytes=choice.bytes + 8 * entries + 4 * problem.integer("local") + 4)


CHOICE = grouped_topk.OP
OP = Op(
    name="route",
    family="moe",
    summary="expert choice, and tokens sorted by expert: grouped_topk and permute",
    axes=(*CHOICE.axes[:2], Axis("local", "int", "experts of this rank", minimum=1), *CHOICE.axes[2:]),
    arguments=(
        Tensor("logits", "m e", strides=ROWS),
        CHOICE.arguments[1],
        Scalar("local", "int", minimum=1, maximum="e"),
        Scalar("first", "int", 0, minimum=0),
        *CHOICE.arguments[2:],
    ),
    returns=(
        Tensor("weights", "m top_k", dtype="fp32"),
        Tensor("ids", "m top_k", dtype="int32"),
        Tensor("expert_offsets", "local+1", dtype="int32"),
        Tensor("permutation", "m*top_k", dtype="int32"),
        Tensor("inverse", "m*top_k", dtype="int32"),
    ),
    rules=(permute.entries_fit_int32, experts_of_a_rank),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    tolerance=CHOICE.tolerance,
    error=error,
    bucket="m",
    examples=problems(
        """
        m=0,e=16,local=16,top_k=2  m=1,e=16,local=8,top_k=2,n_group=8,topk_group=2,x=bf16,scoring=sigmoid,bias=true
        m=7,e=128,local=128,top_k=8  m=33,e=384,local=48,top_k=8,x=bf16,scoring=sigmoid,bias=true
        m=64,e=256,local=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=65,e=256,local=32,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=257,e=32,local=32,top_k=4,x=fp16  m=17,e=8,local=5,top_k=2,x=bf16  m=5,e=1,local=1,top_k=1
        m=64,e=60,local=1,top_k=4,renormalize=false  m=9,e=512,local=511,top_k=22,scoring=sigmoid
        """
    ),
    bench=problems(
        """
        m=1,e=256,local=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=16,e=256,local=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=64,e=256,local=256,top_k=8,n_group=8,topk_group=4,scoring=sigmoid,bias=true
        m=64,e=128,local=128,top_k=8  m=64,e=32,local=32,top_k=4  m=64,e=8,local=8,top_k=2
        """
    ),
)
