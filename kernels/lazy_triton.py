"""Triton, imported at first use, so that the spec and the code of a kernel share one file.

Listing kernels imports every spec, also where Triton is not installed. Spec files therefore declare jitted code with the
names of this module::

    from __future__ import annotations  # `tl.constexpr` in a signature stays text

    from gristmill.kernels.lazy_triton import jit, tl


    @jit
    def double_kernel(x, n, BLOCK: tl.constexpr): ...

Until then `jit` and `constexpr` return placeholders, and `tl` is one. Triton looks up names in the globals of a jitted function,
so `complete` replaces every placeholder in the globals of a module by the real object, after those of the modules that its
helpers come from. Loading a Triton kernel completes the module of its launcher (`gristmill.kernels.load`); a launch through a
placeholder completes the module of the caller. From then on a launch costs the same as with ``triton.jit``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from threading import RLock
from typing import TYPE_CHECKING, Any

__all__ = ["complete", "constexpr", "function_of", "jit", "tl"]

_LOCK = RLock()


class PendingLanguage:
    """``triton.language``, imported when one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def real(self) -> Any:
        """The module."""
        import triton.language

        return triton.language


class PendingConstant:
    """A `tl.constexpr` that jitted functions read as a global."""

    def __init__(self, value: float) -> None:
        self.value = value

    def real(self) -> Any:
        """The constexpr."""
        import triton.language

        return triton.language.constexpr(self.value)


class PendingFunction:
    """A function that is jitted when it is first launched, or called by a jitted function. `options` are those of `triton.jit`."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.function = function
        self.options = options
        self._jitted: Any = None

    def real(self) -> Any:
        """The function jitted by Triton, or by its interpreter under TRITON_INTERPRET=1: the same object each time."""
        import triton

        with _LOCK:
            if self._jitted is None:
                self._jitted = triton.jit(self.function, **self.options)
            return self._jitted

    def __getitem__(self, grid: Any) -> Any:
        """``kernel[grid]``, as of a jitted function."""
        complete(sys._getframe(1).f_globals)
        return function_of(self)[grid]


def complete(namespace: dict[str, Any]) -> None:
    """Replace the placeholders in the globals of a module. Safe to call from several threads, and again."""
    with _LOCK:
        pending = {
            name: value
            for name, value in [*namespace.items()]
            if isinstance(value, PendingLanguage | PendingConstant | PendingFunction)
        }
        for value in pending.values():
            if isinstance(value, PendingFunction) and value.function.__globals__ is not namespace:
                complete(value.function.__globals__)
        # In one step: a thread that sees a jitted function also sees everything that it refers to.
        namespace.update({name: value.real() for name, value in pending.items()})


def function_of(function: Any) -> Any:
    """The jitted function behind a placeholder, its module completed; any other object as it is."""
    if not isinstance(function, PendingFunction):
        return function
    complete(function.function.__globals__)
    return function.real()


if TYPE_CHECKING:
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
else:
    tl, constexpr = PendingLanguage(), PendingConstant

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """`triton.jit` at first use, plain or with options."""
        if function is None:
            return lambda decorated: PendingFunction(decorated, options)
        return PendingFunction(function, options)
