"""The routes: one file each, found by walking. A file declares ENDPOINTS."""

from __future__ import annotations

import importlib
import pkgutil

from gristmill.serve.app import Endpoint


def endpoints() -> list[Endpoint]:
    """Every route."""
    found: list[Endpoint] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        found += importlib.import_module(f"{__name__}.{module.name}").ENDPOINTS
    return found
