"""Names that a package offers from its modules, each imported when it is first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of `package`.

    names: module, relative to `package` -> the names offered from it. modules: submodules that are offered themselves.
    The package repeats the names in an ``if TYPE_CHECKING`` block, which type checkers and editors read.
    """
    homes = {name: f"{package}.{module}" for module, offered in names.items() for name in offered}
    public = sorted({*homes, *modules})

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    return get, lambda: sorted({*public, *vars(sys.modules[package])}), public
