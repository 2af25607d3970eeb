"""Answers and events against the published types of the clients' packages.

The packages build their objects without validation: a missing field, or a value outside a Literal, is accepted in silence. These helpers
validate strictly, and report the fields that the published types do not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
from pydantic import BaseModel, TypeAdapter

STRICT = True
"""No coercion: a number as text is not a number."""


@cache
def _adapter(declared: Any) -> TypeAdapter[Any]:
    return TypeAdapter(declared)


def validated(declared: Any, value: Any) -> set[str]:
    """Fields of a JSON value that its published type does not have, as paths; list indices are left out.

    Raises:
        pydantic.ValidationError: a required field is missing, or a value is not of its type.
    """
    built = _adapter(declared).validate_json(json.dumps(value), strict=STRICT)
    return set(_extra(built, ""))


def _extra(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.__pydantic_extra__ or {}:
            yield f"{place}.{name}".lstrip(".")
        for name in type(value).model_fields:
            yield from _extra(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _extra(item, place)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _extra(item, f"{place}.{name}")


def events_of(response: httpx.Response) -> list[tuple[str | None, Any]]:
    """(event, data) of a stream, in order, read to its end; data that is no JSON as text. Every line must be of a known kind."""
    found: list[tuple[str | None, Any]] = []
    for block in response.read().decode().split("\n\n"):
        name, data = None, []
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data.append(line[6:])
            elif line and not line.startswith(":"):
                raise ValueError(f"no line of a stream of events: {line!r}")
        if data:
            text = "\n".join(data)
            found.append((name, text if text == "[DONE]" else json.loads(text)))
    return found
