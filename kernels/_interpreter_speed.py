"""Triton's interpreter without repeated work: the same results in less time.

The interpreter (Triton 3.6 to 3.9) spends most of its time outside numpy. It patches `triton.language` again at every call
of a device function, builds a table of dtypes for every cast, computes integers a second time in search of overflows that
it does not report, creates new objects for the shape of every tensor, and compares shapes and dtypes of operands element by
element even if they are the same objects. `install` replaces these functions. It raises AttributeError if one of them does not exist.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

Untyped: TypeAlias = Any
"""A value of Triton's interpreter, whose code has no types."""


def install() -> None:
    """Replace the slow functions, in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    _replace(interpreter, "_get_np_dtype", _cached_dtype)
    _replace(interpreter.InterpretedFunction, "__call__", _patched_once)
    _replace(interpreter, "_patch_attr", _direct_calls)
    _replace(interpreter.TensorHandle, "__post_init__", _checked_once)
    # The results of these checks are used with `debug` only, which is off.
    _replace(
        interpreter.interpreter_builder, "options", lambda options: replace(options, sanitize_overflow=False)
    )
    _replace(tl.core.tensor, "__init__", _shared_shapes)
    _replace(tl.core.block_type, "__init__", _shared_types)
    _replace(tl.core.dtype, "__eq__", _same_object)
    _replace(tl.core, "_unwrap_if_constexpr", _seldom_constexpr)
    # Of the interpreter alone: the compiler has a `TritonSemantic` of its own.
    semantic = interpreter.interpreter_semantic
    _replace(semantic, "broadcast_impl_value", _broadcast)
    _replace(semantic, "cast", _cast)
    _replace(semantic, "computation_type_impl", _computed_once)


def _replace(owner: Untyped, name: str, replacement: Callable[[Untyped], Untyped]) -> None:
    """Replace an attribute by `replacement(attribute)`."""
    setattr(owner, name, replacement(getattr(owner, name)))


def _cached_dtype(original: Untyped) -> Untyped:
    """`_get_np_dtype`: numpy's dtype for a Triton dtype."""
    cache: dict[str, Untyped] = {}

    def numpy_dtype(dtype: Untyped) -> Untyped:
        name = dtype.scalar.name
        if name not in cache:
            cache[name] = original(dtype)
        return cache[name]

    return numpy_dtype


def _patched_once(original: Untyped) -> Untyped:
    """`InterpretedFunction.__call__`: a kernel calls a device function.

    The launch has patched `triton.language`. The first call permanently patches the other imports of the function's module.
    """
    from triton.runtime.interpreter import InterpreterError

    called = set()

    def call(self: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
        if self.fn not in called:
            called.add(self.fn)
            return original(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    return call


def _direct_calls(original: Untyped) -> Untyped:
    """`_patch_attr`: in place of a function of `triton.language`, one that adds the interpreter's semantics to the arguments."""
    from triton.language.core import builtin
    from triton.runtime.interpreter import interpreter_semantic

    checks = builtin(lambda: None).__code__  # of the wrapper that refuses calls without semantics

    def patch(owner: Untyped, name: str, member: Untyped, *rest: Untyped) -> None:
        original(owner, name, member, *rest)
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*args: Untyped, **kwargs: Untyped) -> Untyped:
            kwargs["_semantic"] = interpreter_semantic
            return function(*args, **kwargs)

        setattr(owner, name, call)

    return patch


def _checked_once(original: Untyped) -> Untyped:
    """`TensorHandle.__post_init__`: whether numpy's elements fit the dtype."""
    fitting = set()

    def check(self: Untyped) -> None:
        pair = self.data.itemsize, self.dtype.name
        if pair not in fitting:
            original(self)
            fitting.add(pair)

    return check


def _shared_shapes(original: Untyped) -> Untyped:
    """`tensor.__init__`: tensors of one shape share the objects that describe it."""
    shared: dict[tuple[int, ...], dict[str, Untyped]] = {}
    known: dict[
        int, tuple[Untyped, dict[str, Untyped]]
    ] = {}  # by the id of a type's shape, which is kept so that the id stays its own

    def init(self: Untyped, handle: Untyped, type: Untyped) -> None:
        is_block = type.is_block()
        found = known.get(id(type.shape) if is_block else 0)
        if found is None:
            shape = builtins.tuple(type.shape) if is_block else ()
            if shape not in shared:
                original(self, handle, type)
                per_tensor = ("handle", "type", "dtype")
                shared[shape] = {name: value for name, value in vars(self).items() if name not in per_tensor}
            found = known[id(type.shape) if is_block else 0] = type.shape if is_block else None, shared[shape]
        self.__dict__.update(found[1], handle=handle, type=type, dtype=type.scalar)

    return init


def _shared_types(original: Untyped) -> Untyped:
    """`block_type.__init__`: types of one shape and element share their attributes, and types of one shape that."""
    shared: dict[tuple[str, tuple[int, ...]], dict[str, Untyped]] = {}
    shapes: dict[tuple[int, ...], Untyped] = {}
    known: dict[tuple[str, int], dict[str, Untyped]] = {}  # by the id of a shape in `shapes`

    def init(self: Untyped, element_ty: Untyped, shape: Untyped) -> None:
        attributes = known.get((element_ty.name, id(shape)))
        if attributes is None:
            sizes = builtins.tuple(getattr(size, "value", size) for size in shape)
            attributes = shared.get((element_ty.name, sizes))
            if attributes is None:
                original(self, element_ty, shape)
                self.shape = shapes.setdefault(sizes, self.shape)
                attributes = shared[element_ty.name, sizes] = dict(vars(self))
                known[element_ty.name, id(self.shape)] = attributes
        self.__dict__.update(attributes, element_ty=element_ty)

    return init


def _same_object(original: Untyped) -> Untyped:
    """`dtype.__eq__`: there is one object per scalar type."""

    def equal(self: Untyped, other: Untyped) -> Untyped:
        return True if self is other else original(self, other)

    return equal


def _seldom_constexpr(original: Untyped) -> Untyped:
    """`_unwrap_if_constexpr`: most arguments are none."""
    from triton.language import core

    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, bool, int, float, str, type(None)}

    def unwrap(value: Untyped) -> Untyped:
        return value if type(value) in plain else original(value)

    return unwrap


def _broadcast(original: Untyped) -> Untyped:
    """`TritonSemantic.broadcast_impl_value`: two operands in one shape."""
    import numpy as np
    from triton.language import core
    from triton.runtime import interpreter

    def splat(scalar: Untyped, block: Untyped) -> Untyped:
        handle = scalar.handle
        data = np.full(block.handle.data.shape, handle.data, dtype=interpreter._get_np_dtype(handle.dtype))
        return core.tensor(
            interpreter.TensorHandle(data, handle.dtype.scalar),
            block.type.with_element_ty(scalar.type.scalar),
        )

    def broadcast(left: Untyped, right: Untyped) -> Untyped:
        if left.shape is right.shape:  # as `_shared_shapes` makes them
            return left, right
        left_block, right_block = left.type.is_block(), right.type.is_block()
        if left_block and not right_block:
            return left, splat(right, left)
        if right_block and not left_block:
            return splat(left, right), right
        return original(left, right)

    return broadcast


def _cast(original: Untyped) -> Untyped:
    """`TritonSemantic.cast`: to the type that a tensor has."""

    def cast(value: Untyped, target: Untyped, fp_downcast_rounding: Untyped = None) -> Untyped:
        if value.dtype is target and fp_downcast_rounding is None:
            return value
        return original(value, target, fp_downcast_rounding)

    return cast


def _computed_once(original: Untyped) -> Untyped:
    """`TritonSemantic.computation_type_impl`: the type in which two scalar types are computed."""
    known: dict[tuple[str, bool, str, bool, bool], Untyped] = {}

    def computation_type(
        left: Untyped, left_scalar: bool, right: Untyped, right_scalar: bool, div_or_mod: bool
    ) -> Untyped:
        key = left.name, left_scalar, right.name, right_scalar, div_or_mod
        if key not in known:
            known[key] = original(left, left_scalar, right, right_scalar, div_or_mod)
        return known[key]

    return computation_type
