"""A layer of vLLM's model a second time, with vLLM's own method and arbitrary weights: what `gristmill.integrations.measured` times."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gristmill.integrations.measured import Call

T = TypeVar("T")
REFUSALS = (NotImplementedError, ValueError, ImportError)
"""What methods raise that do not serve a layer: no scheme or operator for it, no kernel that can implement it or a size that does not fit, a
package that is missing."""
OLD_GPU = "not supported for the current GPU"
"""Text of the RuntimeError by which compressed-tensors refuses a device."""


class NoMethodError(RuntimeError):
    """vLLM's own method does not serve a layer."""


class UntimedError(RuntimeError):
    """vLLM's own method serves a layer, but does other work than our kernel, so that their times say nothing."""


def served(function: Callable[..., T], *arguments: Any) -> T:
    """What a function of vLLM's own method returns.

    Raises:
        NoMethodError: the method does not serve the layer. Whatever else goes wrong, such as memory that runs out, is raised as it is.
    """
    try:
        return function(*arguments)
    except Exception as error:
        if not _refuses(error):
            raise
        raise NoMethodError(f"{type(error).__name__}: {error}") from error


def _refuses(error: Exception) -> bool:
    if isinstance(error, AttributeError):  # torch.ops: the operator is not in this build of vLLM
        return "_OpNamespace" in str(error)
    return isinstance(error, REFUSALS) or (type(error) is RuntimeError and OLD_GPU in str(error))


def twin_of(layer: Any) -> Any:
    """A copy of a layer that is being made, which takes parameters, buffers and modules of its own beside those that the layer has."""
    twin = copy.copy(layer)
    for registered in ("_parameters", "_buffers", "_modules"):
        setattr(twin, registered, dict(getattr(layer, registered)))
    return twin


def method_of(twin: Any, fallback: Callable[[Any], Any]) -> Any:
    """vLLM's own method of a layer.

    Raises:
        NoMethodError: it cannot be made, for whatever reason: nor can vLLM make it then.
    """
    try:
        return fallback(twin)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NoMethodError(f"{type(error).__name__}: {text_of(error)}") from error


def text_of(error: Exception) -> str:
    """What an error says; the source where it was raised, for an assertion without a text."""
    return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)


def name_of(layer: Any, fallback: Callable[[Any], Any]) -> str:
    """What vLLM multiplies a layer with, by name."""
    twin = twin_of(layer)
    method = method_of(twin, fallback)
    scheme = getattr(twin, "scheme", None)
    return type(method).__name__ + ("" if scheme is None else f" {type(scheme).__name__}")


def product_of(
    layer: Any,
    fallback: Callable[[Any], Any],
    sizes: Sequence[int],
    whole: tuple[int, int],
    k: int,
    dtype: torch.dtype,
    attributes: dict[str, Any],
) -> Call:
    """vLLM's own product with a weight of arbitrary numbers.

    Args:
        sizes: rows of the parts of this rank.
        whole: [n, k] of all ranks.
        attributes: further arguments of `create_weights`.
    """
    twin = twin_of(layer)
    method = method_of(twin, fallback)
    method.create_weights(twin, k, list(sizes), whole[1], whole[0], dtype, **attributes)
    twin.register_parameter("bias", None)  # vLLM registers one after the weight, and its methods ask for it
    fill(layer, twin, (sum(sizes), k))
    method.process_weights_after_loading(twin)

    def product(x: Tensor) -> Tensor:
        out: Tensor = method.apply(twin, x, None)
        return out

    product(torch.zeros(1, k, dtype=dtype))  # a method that cannot multiply says so here
    return product


def fill(layer: Any, twin: Any, shape: tuple[int, int]) -> None:
    """Arbitrary numbers for the parameters that a twin has beside its layer's. The shape is that of a matrix."""
    known = dict(layer.named_parameters())
    for name, parameter in twin.named_parameters():
        if name not in known:
            _fill(name, parameter.data, shape)


def _fill(name: str, data: Tensor, shape: tuple[int, int]) -> None:
    """Numbers that every format allows. Codes are random, because constant ones need less power and run at higher clocks."""
    if name.endswith("weight_shape"):
        data.copy_(torch.tensor(shape, dtype=data.dtype))
    elif "g_idx" in name:  # also the order of its groups
        data.zero_()
    elif data.dtype.is_floating_point and data.dtype.itemsize == 1:
        data.view(torch.uint8).random_(0x30, 0x40)  # between 0.5 and 2 in e4m3fn
    elif data.dtype.is_floating_point:
        data.uniform_(0.01, 0.02)
    elif data.dtype == torch.uint8 and "scale" in name:
        data.fill_(127)  # 1 in e8m0
    else:
        limits = torch.iinfo(data.dtype)
        data.random_(limits.min, limits.max)
