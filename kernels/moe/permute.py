"""Permute: tokens sorted by expert, for grouped products. Everything stays on the device."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import dtype_name, need


def reference(ids: Any, experts: int) -> tuple[Any, Any, Any]:
    """ids int32 [T, K] -> expert_offsets int32 [experts + 1], permutation int32 [T * K], inverse int32 [T * K].

    Sorted place p holds flat entry permutation[p] = token * K + k; places of expert e are expert_offsets[e] up to
    expert_offsets[e + 1], in ascending entry. inverse[entry] is the place, or -1 for an id outside 0...experts - 1 (an
    expert of another rank): such entries lie behind the last expert's, and belong to nobody.
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


def describe(ids: Any, experts: int) -> dict[str, Any]:
    """Axis values of a call; ValueError or TypeError for arguments that do not fit."""
    if dtype_name(ids.dtype) != "int32":
        raise TypeError(f"permute: ids must be int32, got {ids.dtype}")
    need(
        ids.dim() == 2 and ids.shape[1] >= 1, f"permute: ids must be [tokens, top_k], got {tuple(ids.shape)}"
    )
    need(ids.is_contiguous(), f"permute: ids must be contiguous, got strides {ids.stride()}")
    need(ids.numel() < 2**31, f"permute: fewer than 2^31 entries, got {ids.numel()}")
    need(experts >= 1, f"permute: at least one expert, got {experts}")
    return {"m": ids.shape[0], "top_k": ids.shape[1], "e": experts}


def guard(problem: Problem, ids: Any, experts: int, offsets: Any, permutation: Any, inverse: Any) -> int:
    """1 always: offsets are written for no tokens too. ValueError if the call is not one of `problem`."""
    if ids.dim() != 2 or ids.shape[1] != problem.values[1][1] or experts != problem.values[2][1]:
        raise ValueError(f"permute planned for {problem}: got ids {tuple(ids.shape)}, {experts} experts")
    entries = ids.numel()
    for name, t, size in (
        ("ids", ids, entries),
        ("expert_offsets", offsets, experts + 1),
        ("permutation", permutation, entries),
        ("inverse", inverse, entries),
    ):
        if (
            t.numel() != size
            or (t is not ids and t.dim() != 1)
            or dtype_name(t.dtype) != "int32"
            or not t.is_contiguous()
        ):
            raise ValueError(
                f"permute: {name} must be {size} contiguous int32, got {tuple(t.shape)} {t.dtype}"
            )
    return max(1, int(ids.shape[0]))


def like(ids: Any, experts: int) -> tuple[tuple[Any, Any], ...]:
    """Shape and dtype of the outputs."""
    import torch

    need(1 <= experts < 2**31, f"permute: experts must be at least 1 and fit the int32 ids, got {experts}")
    return ((experts + 1,), torch.int32), ((ids.numel(),), torch.int32), ((ids.numel(),), torch.int32)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Skewed experts (some with nothing), repeated ids in a row, ids of other ranks."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    m, k, e = problem.integer("m"), problem.integer("top_k"), problem.integer("e")
    ids = (e * torch.rand(m, k, generator=generator) ** 2).int().clamp(max=e - 1)
    foreign = torch.rand(m, k, generator=generator) < 0.05
    ids = torch.where(foreign, torch.where(ids % 2 == 0, -1, e), ids)
    return [ids.to(torch.int32).to(device), e]


def cost(problem: Problem) -> Cost:
    """ids read once, two index lists and the offsets written."""
    entries = problem.integer("m") * problem.integer("top_k")
    return Cost(bytes=12 * entries + 4 * problem.integer("e") + 4, flops=0, unit="fp32")


def tolerance(problem: Problem) -> Tolerance:
    """A stable sort has one answer."""
    return Tolerance("exact", 0.0)


OP = Op(
    name="permute",
    family="moe",
    summary="tokens sorted by expert: offsets, order and its inverse",
    axes=(
        Axis("m", "int", "tokens", dynamic=True),
        Axis("top_k", "int", "experts a token", minimum=1),
        Axis("e", "int", "experts", minimum=1),
    ),
    arguments="Tensor ids, int experts",
    outputs=("expert_offsets", "permutation", "inverse"),
    reference=reference,
    describe=describe,
    guard=guard,
    like=like,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    bucket="m",
    examples=(
        "m=0,top_k=2,e=4",
        "m=1,top_k=1,e=1",
        "m=7,top_k=3,e=5",
        "m=33,top_k=8,e=64",
        "m=257,top_k=2,e=7",
    ),
    bench=("m=1,top_k=8,e=256", "m=64,top_k=8,e=256", "m=4096,top_k=8,e=256"),
)
