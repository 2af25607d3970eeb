"""What the checks of a call ask of one argument: the strides of tensors, the sizes of weights."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from gristmill.kernel_registry.argument_checks import shown
from gristmill.kernel_registry.dtypes import dtype_name
from gristmill.kernel_registry.scheme import QuantScheme


def vectors(x: Any) -> bool:
    """Whether the last dimension of x is contiguous."""
    return bool(x.stride(-1) == 1 or x.shape[-1] <= 1)


def rows(x: Any) -> bool:
    """Whether the last dimension of x is contiguous and the leading ones flatten to rows of one stride."""
    if not vectors(x):
        return False
    stride = None
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1 and stride is not None and step != stride:
            return False
        if size != 1 or stride is not None:
            stride = step * size
    return True


def matrix(x: Any) -> bool:
    """Whether x is contiguous, or at most two-dimensional with a contiguous last dimension."""
    return bool(x.is_contiguous() or (x.dim() <= 2 and vectors(x)))


def strided(x: Any) -> bool:
    """True: any strides are allowed."""
    return True


def apart(x: Any) -> bool:
    """Whether no two elements of x share memory. Required of tensors that are written."""
    if _nested(zip(reversed(x.stride()), reversed(x.shape), strict=True)):  # the usual order
        return True
    return not x.numel() or _nested(sorted(zip(x.stride(), x.shape, strict=True)))


def _nested(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether the stride of each dimension (stride, size) is at least the span of those before it."""
    span = 1
    for step, size in dimensions:
        if size > 1:
            if step < span:
                return False
            span += step * (size - 1)
    return True


def value_of(value: Any) -> str:
    """A number, flag or string, or a tensor in their place, as messages print it."""
    return f"a tensor {list(value.shape)}" if hasattr(value, "shape") else repr(value)


def dense_or_quantized(where: str, name: str, declared: str, argument: Any) -> tuple[Any, str, bool]:
    """(weight, scheme, act-order) of a QuantTensor or of a list of one dense tensor; ValueError or TypeError otherwise.

    The scheme of packed tensors is not stored in them: they need the plan that they were packed for.
    """
    if not isinstance(argument, list | tuple):
        if not hasattr(argument, "scheme"):
            raise TypeError(
                f"{where}: {name} must be a QuantTensor or a list of tensors, got {type(argument).__name__}"
            )
        weight, scheme, act_order = argument, str(argument.scheme), argument.g_idx is not None
    elif len(argument) == 1:
        weight, scheme, act_order = argument[0], dtype_name(argument[0].dtype), False
        if scheme not in ("fp32", "fp16", "bf16"):
            raise TypeError(
                f"{where}: a dense {name} is fp32, fp16 or bf16, got {scheme}; quantized weights need a plan"
            )
        if not weight.is_contiguous():
            raise ValueError(
                f"{where}: {name} must be contiguous, got shape {list(weight.shape)} with strides {weight.stride()}; "
                "call .contiguous() first"
            )
    else:
        raise ValueError(
            f"{where}: {name} has {len(argument)} packed tensors, from which the scheme cannot be derived; pass the plan they "
            f"were packed for, or one dense {shown(declared)} tensor in a list"
        )
    if len(weight.shape) != len(declared.split()):
        raise ValueError(f"{where}: {name} must be {shown(declared)}, got {list(weight.shape)}")
    return weight, scheme, act_order


def stated_size(where: str, name: str, declared: str, argument: Any, stated: Any) -> Any:
    """The number of rows of a weight: the stated one or, if that is 0, the one of its first tensor.

    Raises:
        ValueError: the tensors cannot hold that many rows, or the number of rows cannot be derived from them.
    """
    listed = isinstance(argument, list | tuple)
    if stated > 0 and listed and not argument:
        return stated
    first = argument[0] if listed else argument
    if not stated and len(first.shape) != len(declared.split()):
        raise ValueError(f"{where}: the number of rows of {name} cannot be derived from its packing; pass it")
    size = stated or first.shape[-2]
    nbytes = first.numel() * first.element_size()  # .nbytes has no symbolic sizes, as torch.compile has
    if size < 1 or (listed and size > 2 * nbytes):  # a row has at least half a byte
        raise ValueError(
            f"{where}: {name} has at least one row, and no more than its bytes can hold: not {size} in {list(first.shape)}"
        )
    return size


def code_bytes(scheme: str, sizes: tuple[int, ...]) -> int:
    """Bytes of the codes of a weight of the given sizes."""
    return QuantScheme.parse(scheme).code_bytes(sizes[-1]) * prod(sizes[:-1])
