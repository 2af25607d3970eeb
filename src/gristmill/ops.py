"""Operations on torch tensors: ``gristmill.ops.rms_norm(x, weight, eps)``.

Every operation of the registry is here as a function, and as one torch operator, with these overloads among others:
``torch.ops.gristmill.<op>.out(*arguments, plan, *outputs)`` is the primary one and writes into its last arguments;
``torch.ops.gristmill.<op>(*inputs, plan=0)`` allocates them; *inputs* are the arguments without ``workspace`` and ``lse``, for
traced code. ``plan`` is the handle of a `BoundPlan` (0: find the kernel from the arguments; the answer is remembered). Outputs
are positional: keyword arguments cost more per call than a plan.

Signatures for type checkers are in ops.pyi, which ``python ci/generate.py`` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gristmill.autotune.binding import bind as bind
from gristmill.autotune.binding import layouts as layouts
from gristmill.autotune.binding import prepare as prepare
from gristmill.autotune.binding import release as release
from gristmill.autotune.binding import resolver as resolver
from gristmill.autotune.binding import seal as seal
from gristmill.autotune.operators import functions
from gristmill.kernel_registry.registry import UnknownError, default_registry

_FUNCTIONS = functions(default_registry())

__all__ = sorted([*_FUNCTIONS, "bind", "layouts", "prepare", "release", "resolver", "seal"])


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        default_registry().op(name)
    except UnknownError as error:
        raise AttributeError(f"gristmill.ops: {error}") from None
    raise AttributeError(name)


def __dir__() -> list[str]:
    return __all__
