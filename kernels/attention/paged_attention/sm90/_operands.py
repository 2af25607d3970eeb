"""What the launches of paged attention on Hopper have in common: their operands as the kernels take them."""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.kernels.attention.paged_attention.sm90.spec import COUNTER_BYTES
from gristmill.kernels.common import need_workspace
from gristmill.kernels.kv_cache.quantized import scale_strides


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q in rows of whole 16-byte pieces and a scale above 0, with the same scores: the kernels look for the largest score, not for the
    smallest."""
    if scale <= 0.0:
        q, scale = q * (-1.0 if scale < 0.0 else 0.0), -scale or 1.0
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.contiguous()
    return q, scale


@dataclass(frozen=True)
class Space:
    """Addresses of the counters and of the partial results; memory: what has to live until the launch."""

    counters: int
    parts: int
    memory: tuple[Tensor, ...]


def space(workspace: Tensor | None, size: int, device: torch.device) -> Space:
    """The workspace of a launch with `size` bytes of partial results, or fresh memory without one. ValueError if it is too small."""
    if workspace is None:
        counters = torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device=device)
        parts = torch.empty(size, dtype=torch.uint8, device=device)
        return Space(counters.data_ptr(), parts.data_ptr(), (counters, parts))
    need_workspace("paged_attention", workspace, COUNTER_BYTES + size, device)
    return Space(workspace.data_ptr(), workspace.data_ptr() + COUNTER_BYTES, (workspace,))


def strides(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> object:
    """The strides that the entry points read, in elements; those of scales are last."""
    return (c_int64 * 17)(
        *q.stride()[:2],
        *out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *scale_strides(k_scale),
        *scale_strides(v_scale),
    )


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor is, or null."""
    return None if tensor is None else tensor.data_ptr()
