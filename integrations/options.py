"""Options of `gristmill.LLM` as hosts hand them over: by name, and from command lines as text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM


def engine_options(options: Mapping[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options as keyword arguments of `LLM`; texts that are numbers, ``true``, ``false`` or ``none`` become those.

    Args:
        leave_out: names that the host has another argument for.

    Raises:
        UsageError: an unknown name.
    """
    known = [name for name in inspect.signature(LLM).parameters if name not in ("model", *leave_out)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"gristmill.LLM has no option {', '.join(unknown)}; known: {', '.join(known)}")
    return {name: _value(option) if isinstance(option, str) else option for name, option in options.items()}


def _value(text: str) -> str | int | float | bool | None:
    constants: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
