"""Small helpers shared by operation definitions and launchers. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.dtypes import TORCH_NAMES, canonical_dtype
from gristmill.kernel_registry.dtypes import dtype_name as dtype_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ITEM_BYTES = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
FLOATS = ("fp32", "fp16", "bf16")
DTYPE_CODES = {
    "fp32": 0,
    "fp16": 1,
    "bf16": 2,
    "fp8": 3,
    "fp8_e5m2": 4,
    "int8": 5,
    "uint8": 6,
    "int32": 7,
    "int64": 8,
}
"""Codes of ``int dtype`` arguments of native entries, the same numbers as in gm_cpu.h."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name (see `canonical_dtype`); ValueError for an unknown one."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[canonical_dtype(name)])
    return dtype


def need(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`, for arguments that contradict each other."""
    if not condition:
        raise ValueError(message)


def row_stride(x: Tensor) -> int:
    """Elements between rows of x seen as [rows, x.shape[-1]], whose leading dimensions flatten to one stride."""
    if x.dim() == 2:
        return int(x.stride(0))
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1:
            return int(step)
    return int(x.shape[-1])


def need_plain(op: str, dtype: str, **tensors: Tensor | None) -> None:
    """ValueError unless every given tensor has `dtype` and is contiguous, for kernels that do not read strides."""
    for name, x in tensors.items():
        if x is not None and (dtype_name(x.dtype) != dtype or not x.is_contiguous()):
            raise ValueError(
                f"{op}: {name} must be a contiguous {dtype} tensor, got {x.dtype} {tuple(x.shape)} with strides "
                f"{tuple(x.stride())}"
            )


def need_workspace(op: str, workspace: Tensor, size: int, device: torch.device | str) -> None:
    """ValueError unless a caller's workspace has `size` bytes that a kernel can use on `device`."""
    if (
        workspace.nbytes < size
        or workspace.device != device
        or not workspace.is_contiguous()
        or workspace.data_ptr() % 16
    ):
        raise ValueError(
            f"{op}: the workspace must be {size} contiguous bytes on {device}, 16-byte aligned, "
            f"got {workspace.nbytes} on {workspace.device}"
        )
