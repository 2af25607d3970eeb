"""Calls of an operation by its name, and launchers written with the arguments one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gristmill.kernel_registry.call import Call
from gristmill.kernel_registry.registry import default_registry


def make_call(op: str, *arguments: Any, **named: Any) -> Any:
    """The call of `op` with these arguments and outputs. By position, the last are the outputs; what is missing before them has its default."""
    operation = default_registry().op(op)
    count = len(operation.outputs)
    if not named and count and len(arguments) < len(operation.Call.names):
        named = dict(zip(operation.outputs, arguments[-count:], strict=True))
        arguments = arguments[:-count]
    return operation.Call(*arguments, **named)


def positional(function: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher ``launch(config, call)`` of a function of a configuration, arguments and outputs; the function itself may still be
    called."""

    def launch(config: Any, *arguments: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Call):
            return function(config, *arguments[0].values())
        return function(config, *arguments)

    launch.__name__ = launch.__qualname__ = function.__name__
    return launch
