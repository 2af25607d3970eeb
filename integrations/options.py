"""Options of `gristmill.LLM` as hosts hand them over: by name, and from command lines as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.runtime.engine_config import EngineConfig


def engine_options(options: Mapping[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options as keyword arguments of `LLM`; texts that are numbers, ``true``, ``false`` or ``none`` become those.

    Args:
        leave_out: names that the host has another argument for.

    Raises:
        UsageError: an unknown name, as of `EngineConfig.require_known`.
    """
    EngineConfig.require_known(options, leave_out)
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
