"""The decomposed chain: permute, grouped_linear with silu_mul, grouped_linear, combine, over one workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gristmill.kernel_registry.kernel import Config, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.moe.combine.op import OP as COMBINE
from gristmill.kernels.moe.grouped_linear.op import OP as GROUPED_LINEAR
from gristmill.kernels.moe.permute.op import OP as PERMUTE

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import CombineCall, GroupedLinearCall, MoeCall, PermuteCall

ALIGNMENT = 256
"""Every part of a workspace begins at a multiple of so many bytes."""


def aligned(size: int) -> int:
    """The bytes that a part of `size` bytes takes in a workspace."""
    return cdiv(size, ALIGNMENT) * ALIGNMENT


def room(sizes: Iterable[int]) -> int:
    """The bytes of a workspace with parts of `sizes` bytes."""
    return sum(map(aligned, sizes))


@dataclass(frozen=True)
class Parts:
    """The launchers of the four steps, each with its configuration. Expert parallelism replaces the middle ones."""

    permute: Callable[[PermuteCall], None]
    first: Callable[[GroupedLinearCall], None]
    second: Callable[[GroupedLinearCall], None]
    combine: Callable[[CombineCall], None]


def pieces(entries: int, experts: int, hidden: int, inner: int, item: int) -> tuple[int, ...]:
    """Bytes of offsets, permutation, inverse, activations and expert rows."""
    return 4 * (experts + 1), 4 * entries, 4 * entries, entries * inner * item, entries * hidden * item


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of all intermediate tensors."""
    entries = problem.integer("m") * problem.integer("top_k")
    sizes = pieces(
        entries,
        problem.integer("e"),
        problem.integer("h"),
        problem.integer("i"),
        ITEM_BYTES[problem.text("x")],
    )
    return Workspace(room(sizes))


def memory(space: Tensor | None, like: Tensor, sizes: Sequence[int]) -> Tensor:
    """The workspace, once it has room for parts of `sizes` bytes, each a multiple of `ALIGNMENT`; a new allocation when it is None.

    ValueError for a workspace that is too small, not contiguous, or on another device than `like`.
    """
    import torch

    needed = room(sizes)
    if space is None:
        return torch.empty(needed, dtype=torch.uint8, device=like.device)
    if space.device != like.device or not space.is_contiguous() or space.nbytes < needed:
        raise ValueError(
            f"moe: the workspace must be {needed} contiguous bytes on {like.device}, got {space.nbytes} on "
            f"{space.device}"
        )
    return space


def carve(space: Tensor | None, like: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """uint8 tensors of `sizes` bytes out of `memory`."""
    import torch

    flat, parts, start = memory(space, like, sizes).view(-1).view(torch.uint8), [], 0
    for size in sizes:
        parts.append(flat[start : start + size])
        start += aligned(size)
    return parts


class Views(NamedTuple):
    """The intermediate tensors of a call: offsets [experts + 1], permutation and inverse [T * K], all int32; activations [T * K, I] and
    rows [T * K, H] in x's dtype."""

    offsets: Tensor
    permutation: Tensor
    inverse: Tensor
    activations: Tensor
    rows: Tensor


ORDER = ("expert_offsets", "permutation", "inverse")
"""The derived arguments of `moe` that a chain reads."""


def ordered(
    call: MoeCall,
    experts: int,
    memory: tuple[Tensor, Tensor, Tensor],
    permute: Callable[[PermuteCall], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, permutation and inverse: those that the call gives, or those that `permute` writes into `memory`."""
    if call.expert_offsets is not None and call.permutation is not None and call.inverse is not None:
        return call.expert_offsets, call.permutation, call.inverse
    permute(PERMUTE.Call(call.ids, experts, *memory))
    return memory


def views(space: Tensor | None, x: Tensor, entries: int, experts: int, inner: int) -> Views:
    """The intermediate tensors in a workspace, or in a new allocation when it is None."""
    import torch

    hidden = x.shape[1]
    offsets, permutation, inverse, acts, rows = carve(
        space, x, pieces(entries, experts, hidden, inner, x.element_size())
    )
    return Views(
        offsets.view(torch.int32),
        permutation.view(torch.int32),
        inverse.view(torch.int32),
        acts.view(x.dtype).view(entries, inner),
        rows.view(x.dtype).view(entries, hidden),
    )


def sizes_of(w13: list[Tensor], inter: int) -> tuple[int, int]:
    """Inner size and experts of packed weights: every layout has the experts first; dense and plain ones have the rows second.

    ValueError for tiled weights without `inter`.
    """
    if not inter and w13[0].dim() != 3:
        raise ValueError(
            f"moe: weights in tiles {tuple(w13[0].shape)} do not determine their inner size; pass inter="
        )
    return inter or w13[0].shape[1] // 2, w13[0].shape[0]


def run(parts: Parts, call: MoeCall) -> None:
    """x [T, H] -> out [T, H] through the parts."""
    if not call.x.shape[0]:
        return
    inner, experts = sizes_of(call.w13, call.inter)
    made = views(call.workspace, call.x, call.ids.numel(), experts, inner)
    offsets, permutation, inverse = ordered(call, experts, made[:3], parts.permute)
    activations, rows = made[3:]
    parts.first(
        GROUPED_LINEAR.Call(
            call.x,
            call.w13,
            offsets,
            permutation,
            call.ids.shape[1],
            True,
            2 * inner,
            call.w13_bias,
            call.clamp,
            call.alpha,
            call.limit,
            activations,
        )
    )
    parts.second(
        GROUPED_LINEAR.Call(
            activations,
            call.w2,
            offsets,
            None,
            1,
            False,
            call.x.shape[1],
            call.w2_bias,
            False,
            call.alpha,
            call.limit,
            rows,
        )
    )
    parts.combine(COMBINE.Call(rows, inverse, call.weights, call.out))
