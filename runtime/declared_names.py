"""Names that come from outside: from JSON, from the options of a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gristmill.runtime.errors import UsageError


def require_fields(declared: type, values: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """`values`; UsageError, which says that `what` has none of these, if they are not all fields of a dataclass."""
    names = [field.name for field in fields(declared)]
    if unknown := [str(name) for name in values if name not in names]:
        raise UsageError(f"{what} has no {', '.join(unknown)}; known: {', '.join(names)}")
    return values
