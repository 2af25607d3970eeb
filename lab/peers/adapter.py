"""How a peer is found and called, as data."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from gristmill.kernel_registry.kernel import accept_all
from gristmill.kernel_registry.problem import Problem

Arguments = list[Any]
"""The arguments of an operation, in order; weights as QuantTensor until they are packed."""
Run = Callable[[], Any]


def as_they_are(problem: Problem, arguments: Arguments) -> Arguments:
    """The `pack` of an operation without weights."""
    return arguments


def returned(arguments: Arguments, result: Any) -> list[torch.Tensor]:
    """The `outputs` of a call that returns them."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def in_place(arguments: Arguments, result: Any) -> list[torch.Tensor]:
    """The `outputs` of a norm that replaces x, and the residual by the sum."""
    return arguments[:2]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one operation is computed.

    Attributes:
        op: the operation.
        bind: ``bind(problem, arguments)`` -> a call without arguments. What a layer does once (views, plans, memory) is done here; the
            call is timed.
        variant: distinguishes the adapters of a peer for one operation.
        accepts: ``accepts(problem)`` -> None, or why it does not compute a problem.
        pack: ``pack(problem, arguments)`` -> the arguments with weights, and what belongs to them, in the peer's form. Calls with other
            activations get what the first one replaced.
        outputs: ``outputs(arguments, result of the call)`` -> the outputs of the operation, then the arguments that it writes in place.
    """

    op: str
    bind: Callable[[Problem, Arguments], Run]
    variant: str = ""
    accepts: Callable[[Problem], str | None] = accept_all
    pack: Callable[[Problem, Arguments], Arguments] = as_they_are
    outputs: Callable[[Arguments, Any], list[torch.Tensor]] = returned


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library.

    Attributes:
        package: the distribution that has its code.
        modules: what must be importable.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    adapters: tuple[Adapter, ...]

    @property
    def absence(self) -> str:
        """Why it cannot be called here; "" if it can. Imports the packages that contain its modules."""
        for module in self.modules:
            try:
                if find_spec(module) is None:
                    return f"{module} is not installed"
            except ModuleNotFoundError as error:
                return f"{error.name} is not installed"
            except Exception as error:  # a package may fail in any way when it is imported
                return f"{module} cannot be imported: {type(error).__name__}: {error}"
        return ""

    @property
    def failure(self) -> str:
        """Why its modules fail when they are imported, which takes seconds; "" if they do not."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                return f"{module} cannot be imported: {type(error).__name__}: {error}"
        return ""

    @property
    def version(self) -> str:
        """The version of its package."""
        try:
            return f"{self.package} {version(self.package)}"
        except PackageNotFoundError:
            return f"{self.package} of unknown version"

    def of(self, op: str) -> dict[str, Adapter]:
        """Its adapters of an operation, by the names of candidates."""
        return {
            f"{self.name}_{adapter.variant}" if adapter.variant else self.name: adapter
            for adapter in self.adapters
            if adapter.op == op
        }


def modules_of(package: str) -> list[Any]:
    """The modules of a package, sorted by name, without helpers (`_name`): a file that is added is found."""
    folder = importlib.import_module(package).__path__
    names = sorted(info.name for info in pkgutil.iter_modules(folder) if not info.name.startswith("_"))
    return [importlib.import_module(f"{package}.{name}") for name in names]


def peers() -> dict[str, Peer]:
    """All peers by name: the ``PEER`` of each file in `libraries`."""
    return {module.PEER.name: module.PEER for module in modules_of("lab.peers.libraries")}
