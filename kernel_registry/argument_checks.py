"""Functions that the generated checks call: predicates on strides, and constructors of the errors that they raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gristmill.kernel_registry.arguments import MATRIX, ROWS, STRIDED, STRIDES, VECTORS
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
    if _nested(
        zip(reversed(x.stride()), reversed(x.shape), strict=True)
    ):  # the usual order: fast enough for a guard
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


STRIDES_OF = {VECTORS: vectors, ROWS: rows, MATRIX: matrix, STRIDED: strided}
"""The predicate of each kind of strides except ``contiguous``, for which tensors have a method."""


def need_tensors(where: str, **arguments: Any) -> None:
    """TypeError unless every argument is a tensor."""
    for name, x in arguments.items():
        if not hasattr(x, "dim"):
            raise TypeError(f"{where}: {name} must be a tensor, got {type(x).__name__}")


def shown(declared: str) -> str:
    """A declared shape as messages print it: ``... n`` as ``[..., n]``."""
    return f"{declared} elements" if declared.startswith("(") else f"[{declared.replace(' ', ', ')}]"


def wrong_dims(where: str, name: str, declared: str, x: Any, legend: str = "") -> ValueError:
    """The error for a tensor with the wrong number of dimensions. legend: the meaning of the sizes."""
    return ValueError(f"{where}: {name} must be {shown(declared)}{legend}, got {list(x.shape)}")


def wrong_shape(
    where: str, name: str, declared: str, expected: Sequence[Any], x: Any, origins: str = ""
) -> ValueError:
    """The error for a tensor whose sizes contradict those of other arguments. origins: which arguments determine them."""
    return ValueError(
        f"{where}: {name} must be {shown(declared)} = {list(expected)}{origins}, got {list(x.shape)}"
    )


def wrong_size(where: str, name: str, declared: str, why: str, x: Any) -> ValueError:
    """The error for a tensor with a size that the operation does not support."""
    return ValueError(f"{where}: {name} must be {shown(declared)} with {why}, got {list(x.shape)}")


def wrong_dtype(where: str, name: str, expected: Iterable[Any], x: Any) -> TypeError:
    """The error for a tensor whose dtype is not among the supported ones."""
    return TypeError(f"{where}: {name} must be {' or '.join(map(str, expected))}, got {x.dtype}")


def other_dtype(
    where: str, name: str, x: Any, first: str, dtype: Any, others: Iterable[Any] = ()
) -> TypeError:
    """The error for a tensor with neither the dtype of the first tensor nor one of the `others`."""
    alternatives = "".join(f" or {other}" for other in others)
    return TypeError(f"{where}: {name} must have {first}'s dtype {dtype}{alternatives}, got {x.dtype}")


def unplanned_dtype(where: str, name: str, expected: Any, x: Any) -> ValueError:
    """The error for a tensor whose dtype is not the planned one."""
    return ValueError(f"{where}: {name} must be {expected}, got {x.dtype}")


def wrong_device(where: str, name: str, x: Any, reference: str, device: Any) -> ValueError:
    """The error for a tensor on another device than the first one."""
    return ValueError(f"{where}: {name} is on {x.device}, {reference} on {device}")


def wrong_strides(where: str, name: str, strides: str, x: Any) -> ValueError:
    """The error for strides that no kernel reads without a copy."""
    return ValueError(
        f"{where}: {name} must be {STRIDES.get(strides, strides)}, got shape {list(x.shape)} with strides "
        f"{tuple(x.stride())}; call .contiguous() first"
    )


def overlapping(where: str, name: str, x: Any) -> ValueError:
    """The error for an output whose elements share memory."""
    return ValueError(
        f"{where}: {name} is written, so its elements must not overlap; got shape {list(x.shape)} with strides "
        f"{tuple(x.stride())}"
    )


def wrong_value(where: str, name: str, expected: str, value: Any) -> ValueError:
    """The error for an invalid number, flag or string, or for a tensor in their place."""
    received = f"a tensor {list(value.shape)}" if hasattr(value, "shape") else repr(value)
    return ValueError(f"{where}: {name} must be {expected}, got {received}")


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
        weight, act_order = argument[0], False
        scheme = dtype_name(weight.dtype)
        if scheme not in ("fp32", "fp16", "bf16"):
            raise TypeError(
                f"{where}: a dense {name} is fp32, fp16 or bf16, got {scheme}; quantized weights need a plan"
            )
        if not weight.is_contiguous():
            raise wrong_strides(where, name, "contiguous", weight)
    else:
        raise ValueError(
            f"{where}: {name} has {len(argument)} packed tensors, from which the scheme cannot be derived; pass the plan they "
            f"were packed for, or one dense {shown(declared)} tensor in a list"
        )
    if len(weight.shape) != len(declared.split()):
        raise wrong_dims(where, name, declared, weight)
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
    nbytes = (
        first.numel() * first.element_size()
    )  # nbytes has no symbolic sizes, which torch.compile(dynamic=True) gives
    if size < 1 or (listed and size > 2 * nbytes):  # a row has at least half a byte
        raise ValueError(
            f"{where}: {name} has at least one row, and no more than its bytes can hold: not {size} in {list(first.shape)}"
        )
    return size


def code_bytes(scheme: str, *sizes: int) -> int:
    """Bytes of the codes of a weight of the given sizes."""
    count = QuantScheme.parse(scheme).code_bytes(sizes[-1])
    for size in sizes[:-1]:
        count *= size
    return count


def wrong_weight(where: str, name: str, tensors: Any, least: int, device: Any) -> ValueError:
    """The error for packed tensors whose first one cannot hold the codes of the planned weight."""
    first = tensors[0]
    return ValueError(
        f"{where}: {name} must begin with a contiguous tensor of at least {least} bytes on {device}, packed for this plan; "
        f"got {list(first.shape)} {first.dtype} on {first.device}"
    )
