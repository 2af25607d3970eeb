"""Operations: what is computed. The torch reference is the meaning, the oracle of every test, and the last fallback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gristmill.kernel_registry.problem import Axis, AxisError, AxisValue, Problem, make_problem, parse_problem


@dataclass(frozen=True)
class Cost:
    """The two numbers of a problem: fewest bytes through memory, and arithmetic operations (a multiply-add is two)."""

    bytes: int
    flops: int
    unit: str = "bf16"


@dataclass(frozen=True)
class Tolerance:
    """How far an implementation may be from the reference.

    metric: a name of `gristmill.autotune.metrics`: ``exact``, ``relative`` (max |Δ| / max(|ref|, floor)), ``ulp``,
    ``columns`` (RMS over rows of |Δyₙ| / (‖x‖·‖wₙ‖/√K), the worst column), ``statistics``.
    """

    metric: str
    limit: float


VERIFIED_ROWS = 257
"""Rows of a verification problem at most: odd, past every tile size in use, and quick on the reference path."""


@dataclass(frozen=True)
class Parameter:
    """One argument of an operation: torch schema type, name, default text (None = required), written in place or not."""

    type: str
    name: str
    default: str | None
    mutable: bool


def _parameter(text: str) -> Parameter:
    kind, _, rest = text.partition(" ")
    name, equals, default = rest.partition("=")
    return Parameter(kind, name.strip(), default.strip() if equals else None, "!" in kind)


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation.

    arguments: the inputs in torch schema syntax, in-place ones marked ``(a!)``: ``Tensor x, Tensor weight, float eps``.
    outputs: names of the tensors it produces, () for an operation that only writes into its arguments.
    reference: ``reference(*arguments)`` -> the output, a tuple of them, or None (in place); plain torch, float32 inside.
    describe: ``describe(*arguments)`` -> axis values; raises ValueError or TypeError for arguments that do not fit each
        other, naming what was expected and what came.
    like: ``like(*arguments)`` -> ((shape, dtype), ...) of the outputs; runs under fake tensors.
    inputs: ``inputs(problem, seed, device)`` -> the arguments, as a list, for tests, verification and benchmarks.
    check: ``check(problem)`` -> what keeps its values from going together (heads that do not divide among KV heads), None if
        nothing does. Axes that are open have no value.
    bucket: the axis a plan has buckets for.
    guard: ``guard(problem, *arguments, *outputs)`` -> the call's size on the bucket axis, read from host shapes;
        ValueError if the call does not belong to the static part of `problem`. Runs at every planned call and keeps
        kernels inside their buffers, in a few attribute reads. None: `describe` is run instead, slower.
    shrink: ``shrink(problem)`` -> the smaller problem that verification runs for it (same code path, less work); None
        caps the bucket axis at 257.
    pack: ``pack(kernel, arguments)`` -> the arguments as that kernel takes them, for operations whose weights are packed
        for a layout: `inputs` and `reference` hold the neutral QuantTensor, kernels a list of tensors.
    unplanned: layouts of the weights that a call without a plan passes, for operations with packed weights.
    weights: ``weights(problem)`` -> the (N, K) of each packed weight, for plans to count its layouts' bytes by; None: one
        weight of the axes n and k.
    error: ``error(problem, arguments, outputs, references)`` -> the figure that `tolerance` limits; None = by metric.
    """

    name: str
    family: str
    summary: str
    axes: tuple[Axis, ...]
    arguments: str
    outputs: tuple[str, ...]
    reference: Callable[..., Any]
    describe: Callable[..., Mapping[str, AxisValue]]
    like: Callable[..., tuple[tuple[Any, Any], ...]]
    inputs: Callable[[Problem, int, str], list[Any]]
    cost: Callable[[Problem], Cost]
    tolerance: Callable[[Problem], Tolerance]
    examples: tuple[str, ...]
    bench: tuple[str, ...]
    check: Callable[[Problem], str | None] | None = None
    bucket: str | None = None
    guard: Callable[..., int] | None = None
    shrink: Callable[[Problem], Problem] | None = None
    error: Callable[..., float] | None = None
    pack: Callable[[Any, Sequence[Any]], list[Any]] | None = None
    unplanned: frozenset[str] | None = None
    weights: Callable[[Problem], Sequence[tuple[int, int]]] | None = None
    module: str = ""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The arguments, taken apart."""
        return tuple(_parameter(text.strip()) for text in self.arguments.split(","))

    @cached_property
    def dynamic(self) -> frozenset[str]:
        """Names of the axes that change from call to call."""
        return frozenset(axis.name for axis in self.axes if axis.dynamic)

    def verification(self, problem: Problem) -> Problem:
        """The problem that is run to verify a kernel for `problem`."""
        if self.shrink is not None:
            return self.shrink(problem)
        if self.bucket is None:
            return problem
        return problem.with_values(**{self.bucket: min(problem.integer(self.bucket), VERIFIED_ROWS)})

    def problem(self, given: str | Problem | Mapping[str, object]) -> Problem:
        """A problem of this operation from its text, its axis values or another Problem; AxisError says what is wrong with it."""
        if isinstance(given, str):
            made = parse_problem(self.name, self.axes, given)
        elif isinstance(given, Problem):
            if given.op != self.name:
                raise AxisError(f"{self.name}: got a problem of {given.op}: {given}")
            made = make_problem(self.name, self.axes, given.as_dict())
        else:
            made = make_problem(self.name, self.axes, given)
        wrong = None if self.check is None else self.check(made)
        if wrong is not None:
            raise AxisError(f"{self.name}: {wrong}")
        return made

    def static(self, problem: Problem) -> Problem:
        """`problem` with its dynamic axes open: what a plan is made for."""
        return problem.with_values(**{axis.name: None for axis in self.axes if axis.dynamic})

    def at_bucket(self, static: Problem, size: int) -> Problem:
        """The concrete problem that stands for a bucket whose upper bound is `size`."""
        given = {name: value for name, value in static.values if value is not None}
        if self.bucket is not None:
            given[self.bucket] = size
        for axis in self.axes:
            if axis.dynamic and axis.name not in given:
                given[axis.name] = max(size, axis.minimum)
        return self.problem(given)
