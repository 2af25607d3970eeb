"""Small helpers shared by operation definitions and launchers. Imports no torch: tensors are asked, not built."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.dtypes import TORCH_NAMES, canonical_dtype
from gristmill.kernel_registry.dtypes import dtype_name as dtype_name

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
CPU_DTYPE = {"fp32": 0, "fp16": 1, "bf16": 2}
"""Dtype codes of the C++ entry points."""


def torch_dtype(name: str) -> Any:
    """The torch dtype of a name (see `canonical_dtype`); ValueError for an unknown one."""
    import torch

    return getattr(torch, TORCH_NAMES[canonical_dtype(name)])


def need(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`: for arguments that do not fit each other."""
    if not condition:
        raise ValueError(message)


def rows_of(name: str, x: Any) -> int:
    """Rows of x seen as [rows, x.shape[-1]].

    ValueError unless the last dimension is contiguous and the leading ones flatten to one row stride.
    """
    if x.dim() < 1:
        raise ValueError(f"{name}: expected at least one dimension, got a scalar")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {tuple(x.stride())}")
    rows, stride = 1, None
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1 and stride is not None and step != stride:
            raise ValueError(
                f"{name}: leading dimensions must flatten to rows of one stride, got shape {tuple(x.shape)} "
                f"with strides {tuple(x.stride())}; call .contiguous() first"
            )
        if size != 1 or stride is not None:
            stride = step * size
        rows *= size
    return rows


def row_stride(x: Any) -> int:
    """Elements between rows of x seen as [rows, x.shape[-1]] (see `rows_of`)."""
    if x.dim() == 2:
        return int(x.stride(0))
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1:
            return int(step)
    return int(x.shape[-1])


def need_plain(op: str, dtype: str, **tensors: Any) -> None:
    """ValueError unless every tensor that is given has `dtype` and is contiguous: what kernels read without asking for strides."""
    for name, x in tensors.items():
        if x is not None and (dtype_name(x.dtype) != dtype or not x.is_contiguous()):
            raise ValueError(
                f"{op}: {name} must be a contiguous {dtype} tensor, got {x.dtype} {tuple(x.shape)} with strides "
                f"{tuple(x.stride())}"
            )


def need_vectors(op: str, **tensors: Any) -> None:
    """ValueError unless the last dimension of every tensor is contiguous, and the rows of `out` do not overlap."""
    for name, x in tensors.items():
        if name == "out" and 0 in x.stride() and not x.is_contiguous():
            raise ValueError(
                f"{op}: out is written, so its rows must not overlap; got {tuple(x.shape)} with strides {tuple(x.stride())}"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{op}: the last dimension of {name} must be contiguous, got {tuple(x.shape)} with strides "
                f"{tuple(x.stride())}"
            )


def separate_rows(x: Any) -> bool:
    """Whether no two rows of x (see `rows_of`) overlap, as what is written must not."""
    return x.is_contiguous() or row_stride(x) >= x.shape[-1]


def need_rows(op: str, reads: dict[str, Any], writes: dict[str, Any]) -> None:
    """ValueError unless `rows_of` takes every tensor and the rows of the written ones do not overlap."""
    for name, x in (reads | writes).items():
        rows_of(f"{op}: {name}", x)
    for name, x in writes.items():
        need(
            separate_rows(x),
            f"{op}: {name} is written, so its rows must not overlap; got shape {tuple(x.shape)} with "
            f"strides {tuple(x.stride())}",
        )


def need_workspace(op: str, given: Any, size: int, device: Any) -> None:
    """ValueError unless a caller's workspace has `size` bytes that a kernel can use on `device`."""
    if given.nbytes < size or given.device != device or not given.is_contiguous() or given.data_ptr() % 16:
        raise ValueError(
            f"{op}: the workspace must be {size} contiguous bytes on {device}, 16-byte aligned, "
            f"got {given.nbytes} on {given.device}"
        )
