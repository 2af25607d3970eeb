"""Which problems and kernels a command is about, from what was typed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

import click

from gristmill.bench.place import Place
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import UnknownError, default_registry


def concrete(op: Op, texts: Sequence[str]) -> list[Problem]:
    """Problems with every axis given; UsageError names the open ones."""
    problems = [op.problem(text) for text in texts]
    for problem in problems:
        if problem.open_axes:
            raise click.UsageError(f"problem {problem} leaves {', '.join(problem.open_axes)} open; give every axis a value")
    return problems


def named(op: Op, patterns: str) -> list[Kernel]:
    """Kernels by name or pattern (``linear_*_cpu``), comma-separated; UnknownError if one names nothing."""
    kernels = default_registry().kernels_of(op.name)
    found: list[Kernel] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = [k for k in kernels if fnmatch(k.name, pattern)]
        if not matches:
            if any(c in pattern for c in "*?["):
                raise UnknownError(f"no kernel of {op.name} matches {pattern!r}; they are {', '.join(k.name for k in kernels)}")
            matches = [default_registry().kernel(op.name, pattern)]
        found += [k for k in matches if k not in found]
    return found


def able(op: Op, here: Place) -> list[Kernel]:
    """Kernels that the hardware and this installation can run; on a CPU none that Triton would interpret."""
    kernels = [k for k in default_registry().kernels_of(op.name) if not k.requires.check_hardware(here.target, here.build)
               and not k.requires.check_build(here.target, here.build)]  # fmt: skip
    return [k for k in kernels if not (k.language == "triton" and here.device == "cpu")]


def here_or_refuse(here: Place) -> str:
    """The torch device of a place; UsageError if it is only a description."""
    if here.device is None:
        raise click.UsageError(f"{here.target.name} is not a device of this machine; nothing can run on it")
    return here.device
