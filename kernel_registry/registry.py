"""The registry: every operation, kernel and weight layout, found by walking the packages that hold their specs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.op import Op

ENTRY_POINTS = "gristmill.kernels"

Spec = TypeVar("Spec", Op, Kernel, Layout)


class UnknownError(LookupError):
    """A name that the registry does not hold; the message lists near ones."""


@dataclass
class Registry:
    """Operations, kernels and layouts by name. Filled by `default_registry`, or by hand in tests."""

    ops: dict[str, Op] = field(default_factory=dict)
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def add(self, spec: Op | Kernel | Layout) -> None:
        """Register a spec; ValueError if its name is taken."""
        if isinstance(spec, Op):
            if spec.name in self.ops:
                raise ValueError(f"operation {spec.name} is defined twice")
            self.ops[spec.name] = spec
        elif isinstance(spec, Kernel):
            known = self.kernels.setdefault(spec.op, [])
            if any(kernel.name == spec.name for kernel in known):
                raise ValueError(f"kernel {spec.name} of {spec.op} is registered twice")
            known.append(spec)
        elif isinstance(spec, Layout):
            if spec.name in self.layouts:
                raise ValueError(f"layout {spec.name} is registered twice")
            self.layouts[spec.name] = spec
        else:
            raise TypeError(f"expected an Op, Kernel or Layout, got {type(spec).__name__}")

    def op(self, name: str) -> Op:
        """The operation called `name`; UnknownError lists near names."""
        return _find(self.ops, name, "operation")

    def kernels_of(self, op: str) -> tuple[Kernel, ...]:
        """The kernels of an operation, best declared priority first."""
        self.op(op)
        return tuple(sorted(self.kernels.get(op, ()), key=lambda k: (-k.priority, k.name)))

    def kernel(self, op: str, name: str) -> Kernel:
        """One kernel of an operation; UnknownError lists near names."""
        return _find({kernel.name: kernel for kernel in self.kernels_of(op)}, name, f"kernel of {op}")

    def layout(self, name: str) -> Layout:
        """The weight layout called `name`; UnknownError lists near names."""
        return _find(self.layouts, name, "layout")

    def all_kernels(self) -> Iterator[Kernel]:
        """Every kernel, by operation name and then priority."""
        for op in sorted(self.ops):
            yield from self.kernels_of(op)


def _find(table: dict[str, Spec], name: str, what: str) -> Spec:
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=3)
    hint = (
        f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(sorted(table)) or 'none'}"
    )
    raise UnknownError(f"no {what} called {name!r}{hint}")


def discover(package: str) -> Iterator[Op | Kernel | Layout]:
    """Specs of a package: the attributes OP, KERNEL, KERNELS, LAYOUT, LAYOUTS of its modules.

    Modules whose name begins with an underscore hold code, not specs, and are not imported.
    """
    root = importlib.import_module(package)
    for info in pkgutil.iter_modules(root.__path__):
        if info.name.startswith("_"):
            continue
        name = f"{package}.{info.name}"
        if info.ispkg:
            yield from discover(name)
        else:
            yield from specs_of(importlib.import_module(name))


def specs_of(module: Any) -> Iterator[Op | Kernel | Layout]:
    """The specs that a module declares, each told where it was declared."""
    found: list[Any] = []
    for attribute in ("OP", "KERNEL", "LAYOUT"):
        if hasattr(module, attribute):
            found.append(getattr(module, attribute))
    for attribute in ("KERNELS", "LAYOUTS"):
        found.extend(getattr(module, attribute, ()))
    for spec in found:
        yield replace(spec, module=module.__name__) if hasattr(spec, "module") else spec


@cache
def default_registry() -> Registry:
    """Everything gristmill ships and everything installed packages register under `gristmill.kernels`.

    An entry point names a module that declares OP, KERNEL, KERNELS, LAYOUT or LAYOUTS, like our own.
    """
    from importlib.metadata import (
        entry_points,
    )  # brings in email and sockets: half of an import of this package

    registry = Registry()
    for package in ("gristmill.kernels", "gristmill.quant.layouts"):
        for spec in discover(package):
            registry.add(spec)
    for entry in entry_points(group=ENTRY_POINTS):
        for spec in specs_of(importlib.import_module(entry.value.partition(":")[0])):
            registry.add(spec)
    return registry
