"""Kernels of plugins: a fault in one of their functions refuses the kernel, with the reason, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.plugins import Plugin, PluginKernelError


def guarded(kernel: Kernel, plugin: Plugin) -> Kernel:
    """`kernel` with functions that raise PluginKernelError alone, and warn of it; but `Kernel.accepts` returns the reason, because it is called
    everywhere. What raises when the kernel runs, its launcher and its workspace, quarantines it as any other kernel."""
    functions: dict[str, Any] = {}
    for name, fault in _FAULTS.items():
        function = getattr(kernel, name)
        if function is not None:
            functions[name] = partial(
                _call, function, fault, f"kernel {kernel.name} of plugin {plugin}: {name}"
            )
    return replace(kernel, **functions | {"accepts": partial(_accepts, functions["accepts"])})


def _call(function: Callable[..., Any], fault: Callable[[Any], str], where: str, *arguments: Any) -> Any:
    cause: Exception | None = None
    try:
        value = function(*arguments)
    except Exception as error:
        why, cause = f"raised {type(error).__name__}: {error}", error
    else:
        if not (wrong := fault(value)):
            return value
        why = f"must return {wrong}, returned {value!r}"
    warnings.warn(f"{where} {why}; the kernel is not used", RuntimeWarning, stacklevel=2)
    raise PluginKernelError(f"{where} {why}") from cause


def _accepts(accepts: Callable[..., str | None], *arguments: Any) -> str | None:
    try:
        return accepts(*arguments)
    except PluginKernelError as error:
        return str(error)


def _no_reason(value: Any) -> str:
    return "" if value is None or isinstance(value, str) else "None or the reason why not"


def _no_config(value: Any) -> str:
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(entry, str | int | float) for name, entry in value.items()
    )
    return "" if fits else "names with numbers or text"


def _no_time(value: Any) -> str:
    return "" if value is None or isinstance(value, int | float) else "microseconds or None"


def _no_names(value: Any) -> str:
    fits = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    return "" if fits else "a tuple of names"


_FAULTS: Mapping[str, Callable[[Any], str]] = {
    "accepts": _no_reason,
    "config": _no_config,
    "misfit": _no_reason,
    "estimate": _no_time,
    "estimate_config": _no_time,
    "sources": _no_names,
}
"""Functions that selection calls -> what they must return, where they return something else."""
