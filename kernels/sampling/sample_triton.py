"""Sampling in Triton."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target

if TYPE_CHECKING:
    from torch import Tensor

LISTED = 8192
"""Candidates of a row that have room in the workspace, and in the registers of one program; with more, the search reads the
row itself."""
LARGEST = 2**24
GROUPS = 2048
"""Groups of a row to aim at, whose largest logits are kept: one program holds them."""
PROGRAMS = 4096
"""Programs to aim at: a few for each multiprocessor of the largest devices."""
ALIGNMENT = 256


def accepts(problem: Problem) -> str | None:
    """Vocabularies whose probabilities sum exactly at a resolution of 2^-37, and whose positions fit in int32."""
    v = problem.integer("v")
    return None if v <= LARGEST else f"vocabularies of up to {LARGEST} tokens, got {v}"


def config(problem: Problem, target: Target) -> Config:
    """Rows in parts of whole blocks. What depends on the batch is speed alone: the results are the same for any split."""
    return _config(problem, 2048 if problem.integer("m") > 1 else 1024, 4)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Blocks and warps."""
    return [_config(problem, block, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


def _config(problem: Problem, block: int, warps: int) -> Config:
    m, v = max(problem.integer("m"), 1), problem.integer("v")
    block = min(block, max(256, 1 << (v - 1).bit_length()))
    return {
        "block": block,
        "warps": warps,
        "splits": min(cdiv(v, block), max(1, PROGRAMS // m), 1024),
        "search": 2048,
        "search_warps": 16,
    }


def group_of(v: int) -> int:
    """Tokens of a group: 64, or as many as leave about GROUPS groups; at most the smallest block."""
    return min(max(64, 1 << (cdiv(v, GROUPS) - 1).bit_length()), 1024)


def pieces(rows: int, v: int, splits: int) -> tuple[tuple[str, int], ...]:
    """(dtype, elements) of what the kernels leave for each other."""
    parts, listed = rows * splits, min(v, LISTED)
    return (
        ("float32", rows * cdiv(v, group_of(v))),
        ("float32", rows),  # largest of each group, of each row
        ("int32", rows * cdiv(v, group_of(v))),
        ("int32", rows),  # groups that top_k needs
        ("int32", rows * 3),
        ("int32", rows),
        ("int32", parts * 256),  # brackets, candidates found, histograms
        ("int64", parts * 2),
        ("int32", rows * 2),  # masses, pivots
        ("float64", parts),
        ("int32", parts),  # draw: score, token
        ("int32", rows * listed),
        ("int32", rows * listed),  # candidates: key, token
    )


def _sizes(rows: int, v: int, splits: int) -> list[int]:
    return [
        cdiv(count * (8 if "64" in dtype else 4), ALIGNMENT) * ALIGNMENT
        for dtype, count in pieces(rows, v, splits)
    ]


def workspace(problem: Problem, config: Config) -> Workspace:
    """Histograms and lists of candidates: at most 96 KiB a request, and 1 KiB a part."""
    return Workspace(sum(_sizes(problem.integer("m"), problem.integer("v"), int(config["splits"]))))


def carve(space: Tensor | None, like: Tensor, rows: int, v: int, splits: int) -> list[Tensor]:
    """The tensors of `pieces`, in the caller's workspace or, without one, in fresh memory.

    ValueError for a workspace that is too small, not contiguous, or on another device than `like`.
    """
    import torch

    sizes = _sizes(rows, v, splits)
    if space is None:
        space = torch.empty(sum(sizes), dtype=torch.uint8, device=like.device)
    if (
        space.device != like.device
        or not space.is_contiguous()
        or space.nbytes < sum(sizes)
        or space.data_ptr() % 16
    ):
        raise ValueError(
            f"sample: the workspace must be {sum(sizes)} contiguous bytes on {like.device}, 16-byte aligned, got "
            f"{space.nbytes} on {space.device}"
        )
    flat, found, start = space.view(-1).view(torch.uint8), [], 0
    for (dtype, count), size in zip(pieces(rows, v, splits), sizes, strict=True):
        found.append(flat[start : start + size].view(getattr(torch, dtype))[:count])
        start += size
    return found


KERNEL = Kernel(
    op="sample",
    name="sample_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.sampling._sample_triton:launch",
    aot="gristmill.kernels.sampling._sample_triton:aot",
    requires=Requirement(code="triton"),
    summary="rows in parts; bounds from group maxima or histograms, exact search among candidates; no sort",
    accepts=accepts,
    config=config,
    space=space,
    workspace=workspace,
    batch_invariant=True,
    priority=50,
)
