"""The registry: every operation, kernel and weight layout, discovered in the packages that hold their specs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, TypeVar

from gristmill.kernel_registry.arguments import Tensor
from gristmill.kernel_registry.kernel import Kernel, accept_defaults
from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plugin_kernels import guarded
from gristmill.kernel_registry.plugins import Plugin, PluginFailure, load_plugins
from gristmill.kernel_registry.requirement import Requirement

ENTRY_POINTS = "gristmill.kernels"

Spec = TypeVar("Spec", Op, Kernel, Layout)


class UnknownError(LookupError):
    """A name that is not registered; the message lists similar ones."""


@dataclass
class Registry:
    """Operations, kernels and layouts by name. Filled by `default_registry`, or by hand in tests.

    Attributes:
        failures: plugins that were left out, each with its reason.
        plugins: operations that a plugin declares.
    """

    ops: dict[str, Op] = field(default_factory=dict)
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    failures: list[PluginFailure] = field(default_factory=list)
    plugins: dict[str, Plugin] = field(default_factory=dict)

    def add(self, spec: Op | Kernel | Layout) -> None:
        """Register a spec; ValueError if its name is taken, a kernel supports what is no opt-in axis of its operation, or reads what is no
        derived argument of it."""
        if isinstance(spec, Op):
            if spec.name in self.ops:
                raise ValueError(f"operation {spec.name} is defined twice")
            self.ops[spec.name] = spec
            if spec.name in self.kernels:
                self.kernels[spec.name] = [_limited(kernel, spec) for kernel in self.kernels[spec.name]]
        elif isinstance(spec, Kernel):
            known = self.kernels.setdefault(spec.op, [])
            if any(kernel.name == spec.name for kernel in known):
                raise ValueError(f"kernel {spec.name} of {spec.op} is registered twice")
            known.append(_limited(spec, self.ops[spec.op]) if spec.op in self.ops else spec)
        elif isinstance(spec, Layout):
            if spec.name in self.layouts:
                raise ValueError(f"layout {spec.name} is registered twice")
            self.layouts[spec.name] = spec
        else:
            raise TypeError(f"expected an Op, Kernel or Layout, got {type(spec).__name__}")

    def copy(self) -> Registry:
        """A registry with the same contents that can be extended independently."""
        kernels = {op: [*kernels] for op, kernels in self.kernels.items()}
        return Registry(dict(self.ops), kernels, dict(self.layouts), [*self.failures], dict(self.plugins))

    def leave_out(self, op: str, error: Exception) -> None:
        """Remove an operation of a plugin, and its kernels, after an error that was detected late."""
        self.failures.append(self.plugins.pop(op).failure(error))
        del self.ops[op]
        self.kernels.pop(op, None)

    def op(self, name: str) -> Op:
        """The operation called `name`; UnknownError lists similar names."""
        return _find(self.ops, name, "operation")

    def kernels_of(self, op: str) -> tuple[Kernel, ...]:
        """The kernels of an operation, best declared priority first."""
        self.op(op)
        return tuple(sorted(self.kernels.get(op, ()), key=lambda k: (-k.priority, k.name)))

    def kernel(self, op: str, name: str) -> Kernel:
        """One kernel of an operation, by its name; UnknownError lists similar names."""
        by_name = {kernel.name: kernel for kernel in self.kernels_of(op)}
        return _find(by_name, name, f"kernel of {op}")

    def layout(self, name: str) -> Layout:
        """The weight layout called `name`; UnknownError lists similar names."""
        return _find(self.layouts, name, "layout")

    def all_kernels(self) -> Iterator[Kernel]:
        """Every kernel, by operation name and then priority."""
        for op in sorted(self.ops):
            yield from self.kernels_of(op)


def _limited(kernel: Kernel, op: Op) -> Kernel:
    """`kernel`, refusing problems with values of opt-in axes of `op` that it does not support."""
    defaults = {axis.name: axis.default for axis in op.axes if axis.opt_in and axis.default is not None}
    if unknown := [name for name in kernel.supports if name not in defaults]:
        raise ValueError(f"kernel {kernel.name} supports {', '.join(unknown)}: no opt-in axis of {op.name}")
    derived = {
        argument.name for argument in op.arguments if isinstance(argument, Tensor) and argument.derived
    }
    if unknown := [name for name in kernel.reads if name not in derived]:
        raise ValueError(f"kernel {kernel.name} reads {', '.join(unknown)}: no derived argument of {op.name}")
    missing = {name: default for name, default in defaults.items() if name not in kernel.supports}
    return replace(kernel, accepts=partial(accept_defaults, kernel.accepts, missing)) if missing else kernel


def _find(table: dict[str, Spec], name: str, kind: str) -> Spec:
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=3)
    hint = (
        f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(sorted(table)) or 'none'}"
    )
    raise UnknownError(f"no {kind} called {name!r}{hint}")


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
    """The specs that a module declares, each with the name of that module."""
    specs: list[Any] = []
    for attribute in ("OP", "KERNEL", "LAYOUT"):
        if hasattr(module, attribute):
            specs.append(getattr(module, attribute))
    for attribute in ("KERNELS", "LAYOUTS"):
        specs.extend(getattr(module, attribute, ()))
    for spec in specs:
        yield replace(spec, module=module.__name__) if hasattr(spec, "module") else spec


@cache
def default_registry() -> Registry:
    """Everything gristmill ships and everything installed packages register under `gristmill.kernels`.

    An entry point names a module that declares OP, KERNEL, KERNELS, LAYOUT or LAYOUTS, like our own.
    """
    registry = Registry()
    for package in ("gristmill.kernels", "gristmill.quant.layouts"):
        for spec in discover(package):
            registry.add(spec)
    loaded, failures = load_plugins(ENTRY_POINTS)
    return with_plugins(registry, loaded, failures)


def with_plugins(
    registry: Registry, loaded: Iterable[tuple[Plugin, Any]], failures: Iterable[PluginFailure] = ()
) -> Registry:
    """The registry and the specs of plugin modules. A plugin is added whole or not at all.

    A plugin that declares other objects than specs, uses a name that is already registered, or has kernels of an unknown
    operation is added to `failures`, as is a plugin whose kernels need an operation of such a plugin.
    """
    failed = [*failures]
    specs: dict[Plugin, list[Op | Kernel | Layout]] = {}
    for plugin, module in loaded:
        try:
            specs[plugin] = [*specs_of(module)]
        except Exception as error:  # KERNELS that cannot be iterated over
            failed.append(plugin.failure(error))
    while True:
        extended, newly_failed = _all_added(registry, specs)
        if not newly_failed:
            extended.failures.extend(failed)
            return extended
        failed += newly_failed
        for failure in newly_failed:
            del specs[failure.plugin]


def _all_added(
    registry: Registry, specs: dict[Plugin, list[Op | Kernel | Layout]]
) -> tuple[Registry, list[PluginFailure]]:
    """A copy of the registry with the specs of all plugins, and the plugins that have to be left out of the next attempt."""
    extended = registry.copy()
    failures: list[PluginFailure] = []
    for plugin, declared in specs.items():
        candidate = extended.copy()
        try:
            for spec in declared:
                _check(spec)
                candidate.add(guarded(spec, plugin) if isinstance(spec, Kernel) else spec)
                if isinstance(spec, Op):
                    candidate.plugins[spec.name] = plugin
        except Exception as error:  # a check calls functions of the plugin
            failures.append(plugin.failure(error))
        else:
            extended = candidate
    if failures:  # others may need what these declare
        return extended, failures
    for plugin, declared in specs.items():
        unknown = sorted({s.op for s in declared if isinstance(s, Kernel)} - extended.ops.keys())
        if unknown:
            failures.append(plugin.failure(f"has kernels of {', '.join(unknown)}: no such operation"))
    return extended, failures


def _check(spec: Op | Kernel | Layout) -> None:
    """Raise for a plugin's spec that would fail when it is listed or selected. mypy checks the types of our own specs only."""
    if isinstance(spec, Kernel):
        texts = (spec.op, spec.name, spec.provider, spec.language, spec.target)
        if not all(isinstance(text, str) and text for text in texts):
            raise TypeError(
                f"kernel {spec.name!r}: op, name, provider, language and target must be text, got {texts}"
            )
        if spec.target.count(":") != 1:
            raise ValueError(f"kernel {spec.name}: target must be 'module:attr', got {spec.target!r}")
        if not isinstance(spec.requires, Requirement) or not isinstance(spec.priority, int):
            raise TypeError(f"kernel {spec.name}: requires must be a Requirement and priority an int")
    elif isinstance(spec, Op):
        from gristmill.kernel_registry.argument_functions import Functions
        from gristmill.kernel_registry.argument_names import check_declared

        check_declared(spec)
        Functions(spec)
        for text in (*spec.examples, *spec.bench):
            spec.problem(text)
