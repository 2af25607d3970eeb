"""Checkpoint formats: from tensors in the formats of other tools to QuantTensor, and back. See `contract`.

One module per format declares one `FORMAT`; no other module names a format. Formats are found by walking this package.
Installed packages add formats under the entry point group ``gristmill.formats``; each entry names a module with the same attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from gristmill.kernel_registry.declarations import Declarations, find_declarations
from gristmill.kernel_registry.plugins import PluginFailure
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.formats.contract import (
    Fields,
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    Tensors,
    Writer,
    as_bytes,
    make,
    new_codes,
)

ENTRY_POINTS = "gristmill.formats"


@cache
def _declared() -> Declarations[FormatSpec]:
    return find_declarations(__name__, "FORMAT", FormatSpec, ENTRY_POINTS, lambda spec: (spec.name,))


def checkpoint_formats() -> Mapping[str, FormatSpec]:
    """Every format by its ``quant_method``, ours and those of plugins."""
    return _declared().by_name


def failures() -> tuple[PluginFailure, ...]:
    """Plugins of ``gristmill.formats`` that are not used, and why."""
    return _declared().failures


def open_format(config: Mapping[str, Any], where: str = "quantization_config") -> Format:
    """The format that a quantization configuration describes. `where` is what the configuration is called in messages.

    Raises:
        FormatError: an unknown method, or a configuration that its format does not read.
    """
    method, known = config.get("quant_method"), checkpoint_formats()
    spec = known.get(method) if isinstance(method, str) else None
    spec = spec or next((other for other in known.values() if other.claims(config)), None)
    if spec is None:
        raise FormatError(
            f"{where}: quant_method {method!r} is not supported; known: {', '.join(known)}{_reported()}"
        )
    return spec.read(config, where)


def open_writer(name: str, scheme: QuantScheme | str) -> Writer:
    """The writer of a format in a scheme; FormatError for an unknown format, or a scheme that it does not hold."""
    writers = {spec.name: spec.write for spec in checkpoint_formats().values() if spec.write is not None}
    if name not in writers:
        raise FormatError(f"no format {name!r} to write; known: {', '.join(writers)}{_reported()}")
    return writers[name](scheme)


def _reported() -> str:
    return "".join(f"; {failure}" for failure in failures())


__all__ = [
    "Fields",
    "Format",
    "FormatError",
    "FormatSpec",
    "Place",
    "Source",
    "StoredWeight",
    "Tensors",
    "Writer",
    "as_bytes",
    "checkpoint_formats",
    "failures",
    "make",
    "new_codes",
    "open_format",
    "open_writer",
]
