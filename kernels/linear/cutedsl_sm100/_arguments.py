"""Tensors as TMA reads them: rows contiguous, at multiples of 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv


def aligned(rows: Tensor) -> bool:
    """Whether TMA reads the rows of a matrix: its elements of a row follow each other, rows start at multiples of 16 bytes."""
    return (
        rows.stride(1) == 1
        and rows.stride(0) >= rows.shape[1]
        and rows.stride(0) * rows.element_size() % 16 == 0
        and rows.data_ptr() % 16 == 0
    )


def aligned_rows(x: Tensor, m: int, k: int) -> Tensor:
    """x [..., K] as [M, K], copied if TMA cannot read its rows."""
    rows = x.reshape(m, k)
    return rows if aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def pitched(scales: Tensor) -> Tensor:
    """Given scales [rows, groups] with those of a group behind each other, groups a multiple of 16 bytes apart, as `layers.codes` allocates them;
    others are copied."""
    rows, groups = scales.shape
    first, pitch = scales.stride()
    fits = first == 1 and pitch >= rows and pitch % 4 == 0 and scales.data_ptr() % 16 == 0
    return scales if fits else scales.new_empty(groups, cdiv(rows, 4) * 4).T[:rows].copy_(scales)
