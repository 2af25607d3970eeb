"""Permute: tokens sorted by expert, for grouped products. Everything stays on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch


def reference(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids int32 [T, K] -> expert_offsets int32 [experts + 1], permutation int32 [T * K], inverse int32 [T * K].

    Sorted place p holds flat entry permutation[p] = token * K + k; places of expert e are expert_offsets[e] up to
    expert_offsets[e + 1], in ascending entry. inverse[entry] is the place, or -1 for an id outside 0...experts - 1 (an
    expert of another rank): such entries follow those of the last expert.
    """
    import torch

    flat = ids.reshape(-1).long()
    owner = torch.where((flat >= 0) & (flat < experts), flat, experts)
    permutation = owner.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, owner, torch.ones_like(owner))
    offsets = torch.cat([counts.new_zeros(1), counts[:experts].cumsum(0)])
    places = torch.arange(flat.numel(), device=ids.device)
    inverse = torch.empty_like(permutation).scatter_(0, permutation, places)
    inverse = torch.where(owner < experts, inverse, -1)
    return offsets.to(torch.int32), permutation.to(torch.int32), inverse.to(torch.int32)


def entries_fit_int32(m: int, top_k: int) -> str | None:
    """Entries are numbered in int32."""
    return None if m * top_k < 2**31 else f"ids must have fewer than 2^31 entries, got {m} times {top_k}"


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Skewed experts (some with nothing), repeated ids in a row, ids of other ranks."""
    import torch

    draw, (m, k, e) = Draw(problem, seed, device), problem.integers("m", "top_k", "e")
    ids = (e * draw.uniform(m, k) ** 2).int().clamp(max=e - 1)
    foreign = draw.uniform(m, k) < 0.05
    ids = torch.where(foreign, torch.where(ids % 2 == 0, -1, e), ids)
    return [ids.to(torch.int32).to(device), e]


def cost(problem: Problem) -> Cost:
    """ids read once, two index lists and the offsets written."""
    entries = problem.integer("m") * problem.integer("top_k")
    return Cost(bytes=12 * entries + 4 * problem.integer("e") + 4, flops=0, unit="fp32")


OP = Op(
    name="permute",
    family="moe",
    summary="tokens sorted by expert: offsets, order and its inverse",
    axes=(
        Axis("m", "int", "tokens", dynamic=True),
        Axis("top_k", "int", "experts per token", minimum=1),
        Axis("e", "int", "experts", minimum=1),
    ),
    arguments=(
        Tensor("ids", "m top_k", dtype="int32"),
        Scalar("experts", "int", minimum=1, maximum=2**31 - 1),
    ),
    returns=(
        Tensor("expert_offsets", "e+1", dtype="int32"),
        Tensor("permutation", "m*top_k", dtype="int32"),
        Tensor("inverse", "m*top_k", dtype="int32"),
    ),
    values={"e": "experts"},
    rules=(entries_fit_int32,),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # A stable sort has one answer.
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="m",
    examples=problems(
        """
        m=0,top_k=2,e=4  m=1,top_k=1,e=1  m=7,top_k=3,e=5  m=33,top_k=8,e=64  m=257,top_k=2,e=7
        """
    ),
    bench=("m=1,top_k=8,e=256", "m=64,top_k=8,e=256", "m=4096,top_k=8,e=256"),
)
