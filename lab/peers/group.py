"""Groups of problems, which are raced together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.autotune.metrics import error_of
from gristmill.bench.suites import expand
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.quant import QuantTensor
from lab.peers.adapter import Arguments, modules_of


@dataclass(frozen=True)
class Cell:
    """A problem of a group, and the model that has it."""

    group: str
    model: str
    problem: str

    @property
    def name(self) -> str:
        return f"{self.group} {self.model} {self.problem}"


def copied(value: Any) -> Any:
    """A copy at other addresses; weights that nobody has packed are shared."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def at_other_addresses(problem: Problem, arguments: Arguments, index: int) -> Arguments:
    """The usual `vary`: equal arguments in other memory, except indices and lengths, which all layers of a step share."""
    shared = torch.int32, torch.int64
    return [
        argument if isinstance(argument, torch.Tensor) and argument.dtype in shared else copied(argument)
        for argument in arguments
    ]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Problems of one operation.

    Attributes:
        models: model -> its problems; ``|`` separates alternatives, as in ``m=1|16,n=4096``.
        tiny: the problems of a dry run.
        inputs: ``inputs(problem, device)`` -> arguments. Problems that differ in activations only may share weights.
        vary: ``vary(problem, packed arguments, index)`` -> the arguments of call `index`, none of which another call writes. Together
            they have left the cache when they are used again.
        error: the error of a peer's outputs, where `error_of` is for an implementation of the operation alone.
        limit: of errors, where the operation's tolerance is for fewer outputs than these problems have; None = that tolerance.
    """

    name: str
    op: str
    models: Mapping[str, Sequence[str]]
    tiny: tuple[str, ...]
    inputs: Callable[[Problem, str], Arguments]
    vary: Callable[[Problem, Arguments, int], Arguments] = at_other_addresses
    error: Callable[..., float] = error_of
    limit: Callable[[Problem], float] | None = None

    def problem(self, cell: Cell) -> Problem:
        return default_registry().op(self.op).problem(cell.problem)

    def limit_of(self, problem: Problem) -> float:
        """What an error may be."""
        return self.limit(problem) if self.limit else default_registry().op(self.op).tolerance(problem).limit

    @property
    def cells(self) -> Iterator[Cell]:
        """Its problems, each once: of the first model that has it."""
        seen = set[Problem]()
        for model, texts in self.models.items():
            for text in (text for line in texts for text in expand(line)):
                cell = Cell(self.name, model, text)
                if self.problem(cell) not in seen:
                    seen.add(self.problem(cell))
                    yield cell

    @property
    def dry(self) -> Group:
        """The group with its tiny problems only."""
        return replace(self, models={"tiny": self.tiny})


def weights_in(arguments: Arguments) -> tuple[QuantTensor, ...]:
    """The weights among arguments that are not packed."""
    return tuple(argument for argument in arguments if isinstance(argument, QuantTensor))


def groups() -> dict[str, Group]:
    """All groups by name: the ``GROUPS`` of each file in `groups`."""
    found = [group for module in modules_of("lab.peers.groups") for group in module.GROUPS]
    return {group.name: group for group in found}
