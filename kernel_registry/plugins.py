"""Plugins: modules that installed distributions name by entry points.

A plugin is code that gristmill does not control. Any error while it is loaded becomes a `PluginFailure`, which
`kernelbench doctor` and `kernelbench list` print; everything else works as if the plugin were not installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class Plugin:
    """One entry point: ``name = module`` in `group`, declared by `distribution` ("acme-kernels 1.0")."""

    group: str
    name: str
    module: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.name} ({self.module}, from {self.distribution})"

    def failure(self, error: BaseException | str) -> PluginFailure:
        """The record of why this plugin is not used."""
        if isinstance(error, str):
            return PluginFailure(self, error)
        text = " ".join(str(error).split())
        return PluginFailure(self, f"{type(error).__name__}: {text}" if text else type(error).__name__)


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that is not used, and why, in one line."""

    plugin: Plugin
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.plugin}: {self.reason}"

    def as_dict(self) -> dict[str, str]:
        """The failure as JSON: group, name, module, distribution, reason."""
        return asdict(self.plugin) | {"reason": self.reason}


class PluginKernelError(ValueError):
    """A function of a plugin's kernel raised, or returned what it must not."""


def _state(folder: str) -> tuple[str, int]:
    """A folder of `sys.path`, and when something was last installed there."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


@cache
def _entry_points(folders: tuple[tuple[str, int], ...]) -> Callable[..., Iterable[EntryPoint]]:
    """Selects from those of all distributions on `sys.path`, in this state: to read their files takes milliseconds to a tenth of a second."""
    from importlib.metadata import (
        entry_points,
    )  # imports email and sockets: half of this package's import time

    return entry_points().select


def load_plugins(group: str) -> tuple[list[tuple[Plugin, ModuleType]], list[PluginFailure]]:
    """Import the modules of an entry point group: those that could be imported, and a failure for each of the others.

    The order is that of distribution and entry point names, so that it does not depend on `sys.path`. Raises nothing that a
    plugin raises, SystemExit included.
    """
    plugins = []
    for entry in _entry_points(tuple(map(_state, sys.path)))(group=group):
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
        plugins.append(Plugin(group, entry.name, entry.value.partition(":")[0].strip(), distribution))
    plugins.sort(key=lambda plugin: (plugin.distribution, plugin.name))
    loaded: list[tuple[Plugin, ModuleType]] = []
    failures: list[PluginFailure] = []
    for plugin in plugins:
        try:
            loaded.append((plugin, importlib.import_module(plugin.module)))
        except (Exception, SystemExit) as error:
            failures.append(plugin.failure(error))
    return loaded, failures
