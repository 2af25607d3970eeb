"""Devices of other makers, declared by plugins: modules that installed distributions name under `gristmill.targets`.

Such a module declares ``VENDOR``, a `Vendor`. It is loaded when a name is not in the tables of this package, and when devices are
probed. docs/devices.md describes what a plugin for a device needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from gristmill.kernel_registry.plugins import PluginFailure, load_plugins
from gristmill.kernel_registry.targets import VENDORS, ArchFacts

ENTRY_POINTS = "gristmill.targets"


@dataclass(frozen=True)
class Vendor:
    """The devices of one maker.

    Attributes:
        name: `ascend`; targets are called `ascend:910b`.
        arches: the facts of each architecture; features that are not in the common vocabulary begin with the name and a colon, `ascend:cube`.
        torch: the type of torch's device that has its tensors, `npu`, `mps`, `xla`; `cpu` for a simulator.
        probe: the devices of this machine as `Target`s, in torch's order; an exception says why there is none.
    """

    name: str
    torch: str
    arches: tuple[ArchFacts, ...]
    probe: Callable[[], Iterable[object]]


@dataclass(frozen=True)
class Plugged:
    """The vendors that plugins declare, by name; and the plugins that were left out, with the reason."""

    vendors: dict[str, Vendor]
    failures: tuple[PluginFailure, ...] = ()

    @property
    def arches(self) -> dict[str, ArchFacts]:
        """Their architectures by the name of the target."""
        return {facts.name: facts for vendor in self.vendors.values() for facts in vendor.arches}


@cache
def plugged() -> Plugged:
    """What the installed plugins declare. A plugin that cannot be used is a failure, and changes nothing else."""
    vendors: dict[str, Vendor] = {}
    loaded, failures = load_plugins(ENTRY_POINTS)
    for plugin, module in loaded:
        try:
            vendor = _checked(getattr(module, "VENDOR", None), vendors)
        except Exception as error:  # the check reads what a plugin wrote
            failures.append(plugin.failure(error))
        else:
            vendors[vendor.name] = vendor
    return Plugged(vendors, tuple(failures))


def all_vendors() -> tuple[str, ...]:
    """`VENDORS`, and those that plugins declare."""
    return (*VENDORS, *plugged().vendors)


def _checked(vendor: Any, taken: Iterable[str]) -> Vendor:
    if not isinstance(vendor, Vendor):
        raise TypeError(f"VENDOR must be a Vendor, got {type(vendor).__name__}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", vendor.name) or vendor.name in (*VENDORS, "xpu", *taken):
        raise ValueError(f"vendor {vendor.name!r}: expected a name in lower case that is not taken")
    if vendor.torch in ("cuda", "xpu") or not vendor.torch.isidentifier():
        raise ValueError(
            f"vendor {vendor.name}: torch {vendor.torch!r}: expected a type of torch devices that is not taken"
        )
    for facts in vendor.arches:
        if facts.vendor != vendor.name or not re.fullmatch(rf"{vendor.name}:[a-z0-9_.]+", facts.name):
            raise ValueError(
                f"vendor {vendor.name}: an architecture is {facts.name!r} of {facts.vendor!r}; "
                f"expected {vendor.name}:NAME of {vendor.name}"
            )
    if not vendor.arches or not callable(vendor.probe):
        raise ValueError(f"vendor {vendor.name}: expected architectures, and a function that probes")
    return vendor
