"""Permute in Triton: a stable counting sort in three launches. Every expert's program walks all ids; no atomics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import PermuteCall


BLOCK = 1024


@jit
def count_kernel(ids, offsets, entries, BLOCK: tl.constexpr):
    """offsets[e + 1] = entries of expert e; offsets[0] = 0."""
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += (tl.load(ids + at, mask=at < entries, other=-1) == expert).to(tl.int32)
    tl.store(offsets + expert + 1, tl.sum(total, 0))
    if expert == 0:
        tl.store(offsets, 0)


@jit
def scan_kernel(offsets, experts, BLOCK: tl.constexpr):
    """Counts to running sums, in place, in one program."""
    at = tl.arange(0, BLOCK)
    counts = tl.load(offsets + at, mask=at <= experts, other=0)
    tl.store(offsets + at, tl.cumsum(counts, 0), mask=at <= experts)


@jit
def place_kernel(ids, offsets, permutation, inverse, entries, experts, BLOCK: tl.constexpr):
    """Expert e's entries in ascending order from offsets[e] on; the last program places the ids of no expert."""
    expert = tl.program_id(0)
    place = tl.load(offsets + expert)
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < entries
        owner = tl.load(ids + at, mask=inside, other=-1)
        owner = tl.where((owner < 0) | (owner > experts), experts, owner)
        is_expert = inside & (owner == expert)
        running = tl.cumsum(is_expert.to(tl.int32), 0)
        target = place + running - 1
        tl.store(permutation + target, at, mask=is_expert)
        tl.store(inverse + at, tl.where(expert == experts, -1, target), mask=is_expert)
        place += tl.sum(is_expert.to(tl.int32), 0)


def launch(config: Config, call: PermuteCall) -> None:
    """ids [T, K] -> expert_offsets [experts + 1], permutation and inverse [T * K]."""
    entries = call.ids.numel()
    block = min(BLOCK, next_power_of_2(max(entries, 16)))
    count_kernel[(call.experts,)](call.ids, call.expert_offsets, entries, BLOCK=block)
    scan_kernel[(1,)](call.expert_offsets, call.experts, BLOCK=next_power_of_2(call.experts + 1))
    if entries:
        place_kernel[(call.experts + 1,)](
            call.ids, call.expert_offsets, call.permutation, call.inverse, entries, call.experts, BLOCK=block
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: the three launches."""
    i32 = {"entries": "i32"}
    return [
        AotCase(
            "count",
            count_kernel,
            {"ids": "*i32", "offsets": "*i32"} | i32,
            {"BLOCK": BLOCK},
            {"num_warps": 4},
        ),
        AotCase("scan", scan_kernel, {"offsets": "*i32", "experts": "i32"}, {"BLOCK": 512}, {"num_warps": 4}),
        AotCase(
            "place",
            place_kernel,
            {"ids": "*i32", "offsets": "*i32", "permutation": "*i32", "inverse": "*i32"}
            | i32
            | {"experts": "i32"},
            {"BLOCK": BLOCK},
            {"num_warps": 4},
        ),
    ]


KERNEL = Kernel(
    op="permute",
    name="permute_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="counting sort, one program per expert, no atomics",
    batch_invariant=True,  # integers: nothing is rounded
    priority=50,
)
