"""The problems and kernels of a command, from its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

import click

from gristmill.autotune.place import Place
from gristmill.bench.options import gathered
from gristmill.bench.shapes import Call
from gristmill.bench.suites import OF_AN_OPERATION, expand, load_suite, suite_names
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import UnknownError, default_registry
from gristmill.kernel_registry.targets import VENDORS


@dataclass(frozen=True)
class Workload:
    """One problem; `weight` is its relative number of calls in a model, None for problems from other sources."""

    op: Op
    problem: Problem
    weight: float | None = None


_OPTIONS = (
    click.argument("op_name", metavar="[OP]", required=False),
    click.option(
        "--problem",
        "problem_texts",
        metavar="P",
        multiple=True,
        help="A problem of OP; | separates alternatives, as in m=1|16,n=4096. May be given several times.",
    ),
    click.option(
        "--suite",
        metavar="S",
        help=f"A set of problems: OP's {' or '.join(OF_AN_OPERATION)}, "
        f"{', '.join(suite_names())}, or a file of one.",
    ),
)


@dataclass(frozen=True)
class Asked:
    """The values of OP, --problem and --suite."""

    op_name: str | None
    problem_texts: tuple[str, ...] = ()
    suite: str | None = None

    def workloads(self, calls: Sequence[Call] = ()) -> list[Workload]:
        """The problems that these options and --model select, each once. OP filters a suite or a model.

        UsageError if none or more than one of the three options is given.
        """
        texts, suite = self.problem_texts, self.suite
        if sum(map(bool, (texts, suite, calls))) > 1:
            raise click.UsageError("--problem, --suite and --model exclude each other: give one of them")
        ops = default_registry().op
        op = ops(self.op_name) if self.op_name is not None else None
        if calls:
            selected = [
                Workload(ops(name), ops(name).problem(text), weight)
                for (name, text), weight in call_weights(calls).items()
            ]
        elif suite and suite not in OF_AN_OPERATION:
            selected = [Workload(own, problem) for own, problem in dict.fromkeys(load_suite(suite).problems)]
        elif op is None:
            raise click.UsageError("name an operation, a suite with --suite, or a model with --model")
        else:
            own = texts or (op.examples if suite == "examples" else op.bench)
            selected = [Workload(op, problem) for problem in concrete(op, own)]
        selected = [one for one in selected if op is None or one.op.name == op.name]
        if not selected:
            raise click.UsageError(f"there is no problem of {self.op_name} in {suite or 'the model'}")
        return selected


problem_options = gathered("asked", tuple(one.name for one in fields(Asked)), Asked, *_OPTIONS)
"""Adds OP, --problem and --suite to a command, as its first ones, which gets an `Asked` as ``asked``."""


def call_weights(calls: Iterable[Call]) -> dict[tuple[str, str], float]:
    """(operation, problem) -> the weighted number of calls."""
    weights: dict[tuple[str, str], float] = {}
    for call in calls:
        weights[call.op, call.problem] = weights.get((call.op, call.problem), 0.0) + call.weight
    return weights


def concrete(op: Op, texts: Sequence[str]) -> list[Problem]:
    """Problems with every axis given, alternatives spread out; UsageError names the open ones."""
    problems = [op.problem(text) for line in texts for text in expand(line)]
    for problem in problems:
        if problem.open_axes:
            raise click.UsageError(
                f"problem {problem} leaves {', '.join(problem.open_axes)} open; give every axis a value"
            )
    return problems


def named(op: Op, patterns: str) -> list[Kernel]:
    """Kernels by name or pattern (``linear_*_cpu``), comma-separated; UnknownError if one names nothing."""
    kernels = default_registry().kernels_of(op.name)
    kernels_named: list[Kernel] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = [k for k in kernels if fnmatchcase(k.name, pattern)]
        if not matches:
            if any(c in pattern for c in "*?["):
                raise UnknownError(
                    f"no kernel of {op.name} matches {pattern!r}; they are {', '.join(k.name for k in kernels)}"
                )
            matches = [default_registry().kernel(op.name, pattern)]
        kernels_named += [k for k in matches if k not in kernels_named]
    if not kernels_named:
        raise UnknownError(
            f"{patterns!r} names no kernel of {op.name}; they are {', '.join(k.name for k in kernels)}"
        )
    return kernels_named


def chosen(ops: Sequence[Op], patterns: str | None, here: Place) -> dict[str, list[Kernel]]:
    """The selected kernels of each operation: those that match `patterns`, or all that can run here and peers that could.

    With several operations a pattern must match a kernel of at least one of them; otherwise UnknownError.
    """
    if patterns is None:
        return {op.name: [*able(op, here), *missing_peers(op, here)] for op in ops}
    if len(ops) == 1:
        return {ops[0].name: named(ops[0], patterns)}
    kernels: dict[str, list[Kernel]] = {op.name: [] for op in ops}
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = [
            k for op in ops for k in default_registry().kernels_of(op.name) if fnmatchcase(k.name, pattern)
        ]
        if not matches:
            raise UnknownError(f"no kernel of {', '.join(op.name for op in ops)} matches {pattern!r}")
        for kernel in matches:
            if kernel not in kernels[kernel.op]:
                kernels[kernel.op].append(kernel)
    if not any(kernels.values()):
        raise UnknownError(f"{patterns!r} names no kernel")
    return kernels


def configured(kernel: Kernel, problem: Problem, here: Place, text: str) -> Config:
    """The default configuration with the values of ``name=value,...``; UsageError for unknown names."""
    config = dict(kernel.config(problem, here.target))
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in config:
            raise click.UsageError(
                f"--config: {kernel.name} has no {name.strip()!r} in its configuration; it has {', '.join(config) or 'nothing'}"
            )
        kind = type(config[name.strip()])
        try:
            config[name.strip()] = value.strip() == "True" if kind is bool else kind(value.strip())
        except ValueError as error:
            raise click.UsageError(
                f"--config: {name.strip()} must be {kind.__name__}, got {value!r}"
            ) from error
    return config


def baseline_of(op: Op, problem: Problem, pattern: str, here: Place) -> Kernel:
    """The baseline kernel: the first match that can run the problem here, else the first match."""
    matches = named(op, pattern)
    return next((k for k in matches if not here.why_not(k, problem)), matches[0])


def able(op: Op, here: Place) -> list[Kernel]:
    """Kernels that the hardware and this installation can run; on a CPU without those that Triton would interpret."""
    kernels = [
        k
        for k in default_registry().kernels_of(op.name)
        if not k.requires.check_hardware(here.target, here.build)
        and not k.requires.check_build(here.target, here.build)
    ]
    return [k for k in kernels if not (k.language == "triton" and here.device == "cpu")]


def missing_peers(op: Op, here: Place) -> list[Kernel]:
    """Kernels of other libraries that this hardware could run and this installation cannot, to be reported as gaps."""
    return [
        k
        for k in default_registry().kernels_of(op.name)
        if k.provider != "gristmill"
        and not k.requires.check_hardware(here.target, here.build)
        and k.requires.check_build(here.target, here.build)
    ]


def here_or_refuse(here: Place) -> str:
    """The torch device of `here`; UsageError if it is not a device of this machine, or one whose times cannot be measured."""
    if here.device is None:
        raise click.UsageError(f"{here.target.name} is not a device of this machine; nothing can run on it")
    if here.target.vendor not in VENDORS:
        raise click.UsageError(
            f"times are measured on {', '.join(VENDORS)}; {here.target.name} is a device of a plugin: "
            "its kernels are ranked by their estimates and priorities"
        )
    return here.device
