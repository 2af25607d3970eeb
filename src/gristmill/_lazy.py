"""Names that a package offers from its modules, each imported on first access (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gristmill._garbage import nothing_collected


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of `package`, whose source is `file`.

    The names are those that the package imports under ``if TYPE_CHECKING``: type checkers, editors and the running program
    read the same lines. A name imported from the package itself is a submodule.
    """
    with open(file, encoding="utf-8") as source:
        homes = offered(source.read())

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = homes[name]
        if module == package:
            return import_module(f"{package}.{name}")
        # Modules are made of objects that stay, and a full collection among them visits all of torch's, which takes 0.3 s and more.
        with nothing_collected():
            value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)  # from now on found without this function
        return value

    public = sorted(homes)
    return get, lambda: public, public


def offered(source: str) -> dict[str, str]:
    """Name -> the module that it is imported from, of the ``if TYPE_CHECKING`` blocks at the top level of a module."""
    return {
        name.name: str(statement.module)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
