"""Integers, booleans and token ids as callers give them: Python's, numpy's, torch's."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any, TypeVar, cast

from gristmill.runtime.errors import UsageError

T = TypeVar("T")


def as_integer(value: Any) -> int | None:
    """An integer of any type, such as numpy's, as an int; None for anything else, booleans included."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    if getattr(value, "ndim", 0):  # an array of one element has __index__, too
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_flag(value: Any) -> bool | None:
    """True or False, also of numpy, as a bool; None for anything else: a text such as "no" would be true."""
    is_numpy = str(getattr(value, "dtype", "")) == "bool" and not value.ndim
    return bool(value) if isinstance(value, bool) or is_numpy else None


def plain(value: T) -> T:
    """An integer of numpy or torch as an int; anything else unchanged, for the caller to check."""
    integer = as_integer(value)
    return value if integer is None else cast(T, integer)


def check_bytes_or_part(name: str, value: object, whole: str, least: int) -> None:
    """UsageError unless a value is None, bytes as an int of at least `least`, or a part of `whole` as a float up to 1."""
    is_bytes = type(value) is int and value >= least
    if value is not None and not is_bytes and not (isinstance(value, float) and 0 < value <= 1):
        raise UsageError(
            f"{name} must be bytes (an int) or a part of {whole} (a float up to 1), got {value!r}"
        )


def is_integers(value: object) -> bool:
    """Whether a value is a sequence of integers rather than of other things, by its first element; an array, by its dimensions."""
    dimensions = getattr(value, "ndim", None)
    if dimensions is not None:
        return bool(dimensions == 1)
    return isinstance(value, Sequence) and len(value) > 0 and as_integer(value[0]) is not None


def integers(value: Any, what: str, kind: str = "token ids") -> list[int]:
    """The integers of a sequence, a set, or an array or tensor of one dimension, as a list of ints. `what` and `kind` name them in messages.

    Raises:
        UsageError: anything else: text, an array of other dimensions, elements that are no integers.
    """
    dimensions = getattr(value, "ndim", 1)
    if dimensions != 1:
        rows = ": give each row by itself" if dimensions == 2 else ""
        raise UsageError(f"{what} must be {kind} in one dimension, got {described(value)}{rows}")
    is_array = hasattr(value, "ndim") and hasattr(value, "tolist")
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    if is_text or not (is_array or isinstance(value, Sequence | Set)):
        raise UsageError(f"{what} must be a list or an array of {kind}, got {described(value)}")
    elements: list[Any] = value.tolist() if is_array else list(value)
    if set(map(type, elements)) <= {int}:
        return elements
    converted: list[int] = []
    for element in elements:
        if (integer := as_integer(element)) is None:
            raise UsageError(
                f"{what} must be {kind}, which are integers, got {element!r} in {described(value)}"
            )
        converted.append(integer)
    return converted


def as_prompt(prompt: Any) -> str | list[int]:
    """A prompt: text as it is, token ids as a list. Raises UsageError for anything else."""
    return prompt if isinstance(prompt, str) else integers(prompt, "a prompt that is not text")


def described(value: Any) -> str:
    """The type of a value in messages; of an array also its dtype and shape."""
    name = type(value).__name__
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        return name
    return f"{name} of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
