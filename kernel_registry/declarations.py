"""Declarations: objects that modules of a package, and plugins, declare under one attribute. No list is kept by hand.

`gristmill.kernel_registry.registry` finds kernels, operations and layouts this way. `find_declarations` finds model families
and checkpoint formats; it needs only the package, the attribute, and the names that a declaration takes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gristmill.kernel_registry.plugins import PluginFailure, load_plugins

T = TypeVar("T")


@dataclass(frozen=True)
class Declarations(Generic[T]):
    """Declarations by each of their names, in alphabetical order; and the plugins that were left out, with the reason."""

    by_name: Mapping[str, T]
    failures: tuple[PluginFailure, ...] = ()


def find_declarations(
    package: str, attribute: str, kind: type[T], group: str, names: Callable[[T], Collection[str]]
) -> Declarations[T]:
    """What the modules of `package` declare as `attribute`, and the modules that the entry point group `group` names.

    Modules without the attribute, and those whose name begins with an underscore, hold code for others. `names` gives the
    names of a declaration. A plugin that is not a `kind`, or that takes a name that is taken, becomes a failure.

    Raises:
        TypeError, ValueError: the same of a module of the package.
    """
    by_name: dict[str, T] = {}
    root = importlib.import_module(package)
    for info in pkgutil.iter_modules(root.__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{package}.{info.name}")
            if hasattr(module, attribute):
                _add(by_name, getattr(module, attribute), attribute, kind, names)
    loaded, failures = load_plugins(group)
    for plugin, module in loaded:
        try:
            _add(by_name, getattr(module, attribute), attribute, kind, names)
        except Exception as error:  # `names` reads what a plugin wrote
            failures.append(plugin.failure(error))
    return Declarations(dict(sorted(by_name.items())), tuple(failures))


def _add(
    by_name: dict[str, T], value: Any, attribute: str, kind: type[T], names: Callable[[T], Collection[str]]
) -> None:
    """Add one declaration whole, or raise."""
    if not isinstance(value, kind):
        raise TypeError(f"{attribute} must be a {kind.__name__}, got {type(value).__name__}")
    own = tuple(names(value))
    taken = [name for name in own if not isinstance(name, str) or name in by_name]
    if taken or not own:
        raise ValueError(
            f"{attribute} must have names that are not taken, got {', '.join(map(repr, taken or own))}"
        )
    by_name.update(dict.fromkeys(own, value))
