"""The chain of experts whose products quantize their rows to block-scaled codes in launches of Triton, each row by a factor of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.linear.block_scaled_triton.quantize import OPERANDS
from gristmill.kernels.moe import _chain

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall, MoeCall

    Product = Callable[[Tensor, GroupedLinearCall], None]
    """A product of quantized rows; its first argument is bytes for their codes, scales and factors."""


def sizes_of_rows(form: str, rows: int, k: int) -> tuple[int, int, int]:
    """Bytes of codes, of scales, and of the factors of rows and the maxima that they come from. Scales have room for whole tiles of 128 rows by 4
    groups."""
    of_x = OPERANDS[form]
    scales_of_rows = cdiv(rows, 128) * 128 * cdiv(k // of_x.group, 4) * 4
    sizes = (rows * k // of_x.packed, scales_of_rows, 0 if of_x.emax else 8 * rows)
    codes, scales, factors = map(_chain.aligned, sizes)
    return codes, scales, factors


def room_of_rows(scheme: str, x: Tensor) -> Tensor:
    """An allocation for the codes, scales and factors of the rows of x [R, K]."""
    import torch

    size = sum(sizes_of_rows(str(QuantScheme.parse(scheme).activation), *x.shape))
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def workspace(problem: Problem, config: Config) -> Workspace:
    """Bytes of the chain's intermediate tensors, and of quantized rows: tokens, then those between the products."""
    m, top_k, h, i = problem.integers("m", "top_k", "h", "i")
    form, entries = str(QuantScheme.parse(problem.text("w")).activation), m * top_k
    chain = _chain.pieces(entries, problem.integer("e"), h, i, ITEM_BYTES[problem.text("x")])
    sizes = (*chain, max(sum(sizes_of_rows(form, m, h)), sum(sizes_of_rows(form, entries, i))))
    return Workspace(_chain.room(sizes))


def run(form: str, first: Product, second: Product, call: MoeCall) -> None:
    """x [T, H] -> out [T, H] by products of rows that are quantized in a format; without a workspace it allocates one. No synchronisation."""
    from gristmill.kernels.moe.combine import triton as combine_triton
    from gristmill.kernels.moe.permute import triton as permute_triton

    (tokens, hidden), entries, item = call.x.shape, call.ids.numel(), call.x.element_size()
    if not tokens:
        return
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    of = (sum(sizes_of_rows(form, tokens, hidden)), sum(sizes_of_rows(form, entries, inner)))
    sizes = (*_chain.pieces(entries, experts, hidden, inner, item), max(of))
    memory = _chain.memory(call.workspace, call.x, sizes)
    room = _chain.carve(memory, call.x, sizes)[-1]
    combine = partial(combine_triton.launch, combine_triton.block_config(hidden))
    parts = _chain.Parts(
        partial(permute_triton.launch, {}),
        partial(first, room[: of[0]]),
        partial(second, room[: of[1]]),
        combine,
    )
    _chain.run(parts, call.replace(workspace=memory))
