"""What the generated checks call: questions about the strides of a tensor, and the errors that say what came instead."""

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
    """True: of any strides."""
    return True


def apart(x: Any) -> bool:
    """Whether no two elements of x share memory, as what is written must not."""
    if _nested(
        zip(reversed(x.stride()), reversed(x.shape), strict=True)
    ):  # the usual order, in the time of a guard
        return True
    return not x.numel() or _nested(sorted(zip(x.stride(), x.shape, strict=True)))


def _nested(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether each dimension, (stride, size), steps over all that those before it span."""
    span = 1
    for step, size in dimensions:
        if size > 1:
            if step < span:
                return False
            span += step * (size - 1)
    return True


STRIDES_OF = {VECTORS: vectors, ROWS: rows, MATRIX: matrix, STRIDED: strided}
"""The question of each kind of strides but ``contiguous``, which a tensor answers itself."""


def need_tensors(where: str, **arguments: Any) -> None:
    """TypeError unless every argument is a tensor."""
    for name, x in arguments.items():
        if not hasattr(x, "dim"):
            raise TypeError(f"{where}: {name} must be a tensor, got {type(x).__name__}")


def shown(declared: str) -> str:
    """A declared shape for people: ``... n`` as ``[..., n]``."""
    return f"{declared} elements" if declared.startswith("(") else f"[{declared.replace(' ', ', ')}]"


def wrong_dims(where: str, name: str, declared: str, x: Any, legend: str = "") -> ValueError:
    """The error for a tensor with another number of dimensions; legend: what the sizes are."""
    return ValueError(f"{where}: {name} must be {shown(declared)}{legend}, got {list(x.shape)}")


def wrong_shape(
    where: str, name: str, declared: str, expected: Sequence[Any], x: Any, told: str = ""
) -> ValueError:
    """The error for a tensor whose sizes do not go with the others'; told: which arguments have them."""
    return ValueError(
        f"{where}: {name} must be {shown(declared)} = {list(expected)}{told}, got {list(x.shape)}"
    )


def wrong_size(where: str, name: str, declared: str, why: str, x: Any) -> ValueError:
    """The error for a tensor that has a size that the operation does not take."""
    return ValueError(f"{where}: {name} must be {shown(declared)} with {why}, got {list(x.shape)}")


def wrong_dtype(where: str, name: str, expected: Iterable[Any], x: Any) -> TypeError:
    """The error for a tensor of none of the dtypes that are taken."""
    return TypeError(f"{where}: {name} must be {' or '.join(map(str, expected))}, got {x.dtype}")


def other_dtype(
    where: str, name: str, x: Any, first: str, dtype: Any, others: Iterable[Any] = ()
) -> TypeError:
    """The error for a tensor of another dtype than the first one, and of none of the others that are taken."""
    alternatives = "".join(f" or {other}" for other in others)
    return TypeError(f"{where}: {name} must have {first}'s dtype {dtype}{alternatives}, got {x.dtype}")


def unplanned_dtype(where: str, name: str, expected: Any, x: Any) -> ValueError:
    """The error for a tensor of another dtype than the planned one."""
    return ValueError(f"{where}: {name} must be {expected}, got {x.dtype}")


def wrong_device(where: str, name: str, x: Any, first: str, device: Any) -> ValueError:
    """The error for a tensor that is not where the first one is."""
    return ValueError(f"{where}: {name} is on {x.device}, {first} on {device}")


def wrong_strides(where: str, name: str, strides: str, x: Any) -> ValueError:
    """The error for a tensor that no kernel can read where it lies."""
    return ValueError(
        f"{where}: {name} must be {STRIDES.get(strides, strides)}, got shape {list(x.shape)} with strides "
        f"{tuple(x.stride())}; call .contiguous() first"
    )


def overlapping(where: str, name: str, x: Any) -> ValueError:
    """The error for a tensor that would be written twice in one place."""
    return ValueError(
        f"{where}: {name} is written, so its elements must not overlap; got shape {list(x.shape)} with strides "
        f"{tuple(x.stride())}"
    )


def wrong_value(where: str, name: str, expected: str, value: Any) -> ValueError:
    """The error for a number, a flag or a text that is not taken, and for a tensor where none is, or of another kind."""
    given = f"a tensor {list(value.shape)}" if hasattr(value, "shape") else repr(value)
    return ValueError(f"{where}: {name} must be {expected}, got {given}")


def dense_or_quantized(where: str, name: str, declared: str, given: Any) -> tuple[Any, str, bool]:
    """(the weight, its scheme, its act-order) of a QuantTensor or a list of one dense tensor; ValueError or TypeError otherwise.

    Packed tensors do not say their scheme: they need the plan that they were packed for.
    """
    if not isinstance(given, list | tuple):
        if not hasattr(given, "scheme"):
            raise TypeError(
                f"{where}: {name} must be a QuantTensor or a list of tensors, got {type(given).__name__}"
            )
        weight, scheme, act_order = given, str(given.scheme), given.g_idx is not None
    elif len(given) == 1:
        weight, act_order = given[0], False
        scheme = dtype_name(weight.dtype)
        if scheme not in ("fp32", "fp16", "bf16"):
            raise TypeError(
                f"{where}: a dense {name} is fp32, fp16 or bf16, got {scheme}; quantized weights need a plan"
            )
        if not weight.is_contiguous():
            raise wrong_strides(where, name, "contiguous", weight)
    else:
        raise ValueError(
            f"{where}: {name} has {len(given)} packed tensors, which do not tell their scheme; pass the plan they were "
            f"packed for, or one dense {shown(declared)} tensor in a list"
        )
    if len(weight.shape) != len(declared.split()):
        raise wrong_dims(where, name, declared, weight)
    return weight, scheme, act_order


def stated_size(where: str, name: str, declared: str, given: Any, stated: Any) -> Any:
    """The rows of a weight: as the call states them, or, where it states 0, of its first tensor; ValueError if it cannot have them."""
    listed = isinstance(given, list | tuple)
    if stated > 0 and listed and not given:
        return stated
    first = given[0] if listed else given
    if not stated and len(first.shape) != len(declared.split()):
        raise ValueError(f"{where}: the packing of {name} does not tell its rows; pass their number")
    size = stated or first.shape[-2]
    held = (
        first.numel() * first.element_size()
    )  # nbytes has no symbolic sizes, which torch.compile(dynamic=True) gives
    if size < 1 or (listed and size > 2 * held):  # a row has at least half a byte
        raise ValueError(
            f"{where}: {name} has at least one row, and no more than its bytes can hold: not {size} in {list(first.shape)}"
        )
    return size


def code_bytes(scheme: str, *sizes: int) -> int:
    """Bytes of the codes of a weight of these sizes."""
    count = QuantScheme.parse(scheme).code_bytes(sizes[-1])
    for size in sizes[:-1]:
        count *= size
    return count


def wrong_weight(where: str, name: str, given: Any, least: int, device: Any) -> ValueError:
    """The error for packed tensors whose first cannot be the codes of the weight that was planned."""
    first = given[0]
    return ValueError(
        f"{where}: {name} must begin with a contiguous tensor of at least {least} bytes on {device}, packed for this plan; "
        f"got {list(first.shape)} {first.dtype} on {first.device}"
    )
