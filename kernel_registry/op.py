"""Operations: what is computed. The torch reference defines the result, is the oracle of every test, and the last fallback.

An operation is a file ``kernels/<family>/<op>.py`` with an ``OP``: the reference, its declared arguments and axes, example problems, a
tolerance and a cost. One call of it as data is a `Problem`.

    >>> from gristmill.kernel_registry import default_registry
    >>> op = default_registry().op("rms_norm")
    >>> problem = op.problem("m=7,n=4096")
    >>> str(problem), problem.integer("n"), problem.text("x")
    ('m=7,n=4096', 4096, 'bf16')
    >>> op.cost(problem).bytes == (2 * 7 * 4096 + 4096) * 2
    True
    >>> op.problem("m=7,n=4096,colour=red")
    Traceback (most recent call last):
    gristmill.kernel_registry.problem.AxisError: rms_norm has no axis colour; its axes are m, n, x
    >>> str(op.static(problem))          # dynamic axes open: what a layer's plan is made for
    'n=4096'

Arguments are declared once (`arguments`). The torch schema, `describe` (a call as a problem), `like` (shapes and dtypes of the outputs,
also for fake tensors) and the guard of planned calls are generated from the declarations, as source that is compiled once per operation:
``print(op.source)``. Functions in ``rules`` check what declarations cannot express, where arguments constrain each other.

    >>> import torch
    >>> op.schema, op.describe(torch.zeros(7, 64), torch.zeros(64), 1e-5) == op.problem("m=7,n=64,x=fp32")
    ('Tensor x, Tensor weight, float eps', True)
    >>> op.describe(torch.zeros(7, 64), torch.zeros(63), 1e-5)
    Traceback (most recent call last):
    ValueError: rms_norm: weight must be [n] = [64], n as in x, got [63]
    >>> guard = op.guard(op.problem("n=64,x=fp32"))
    >>> guard(op.Call(torch.zeros(7, 64), torch.zeros(64), 1e-5, torch.zeros(7, 64)))     # the size that selects the bucket
    7

`Op.check` refuses values that do not fit together, such as query heads that are not a multiple of KV heads. Inputs can therefore be
generated for every problem that an operation accepts, and a mistyped problem does not count against the kernels. Ragged operations are
described only by bounds that the host knows (``q_tokens, seqs, max_q, max_ctx, total_ctx``); their input generators derive the lengths
from the bounds and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.problem import Axis, AxisError, Problem, make_problem, parse_problem

if TYPE_CHECKING:
    from gristmill.kernel_registry.argument_functions import Functions
    from gristmill.kernel_registry.arguments import Argument, Parameter, Tensor
    from gristmill.kernel_registry.kernel import Config, Kernel
    from gristmill.kernel_registry.layout import Layout


LAST_BUCKET = 8192
"""The nominal size of a plan's last bucket, every call above 4096; `Op.last_bucket` is what it is selected and timed at."""


@dataclass(frozen=True)
class Cost:
    """The two numbers of a problem: fewest bytes through memory, and arithmetic operations (a multiply-add is two)."""

    bytes: int
    flops: int
    unit: str = "bf16"


@dataclass(frozen=True)
class Tolerance:
    """How far an implementation may be from the reference.

    Metrics are those of `gristmill.autotune.metrics`: ``exact``, ``relative`` (max |Δ| / max(|ref|, floor)), ``ulp``,
    ``columns`` (RMS over rows of |Δyₙ| / (‖x‖·‖wₙ‖/√K), the worst column), ``statistics``.
    """

    metric: str
    limit: float

    @staticmethod
    def by_dtype(metric: str, **limits: float) -> Callable[[Problem], Tolerance]:
        """An operation's `tolerance` with one limit for each dtype of its axis x."""
        return lambda problem: Tolerance(metric, limits[problem.text("x")])


VERIFIED_ROWS = 257
"""Rows of a verification problem at most: odd, past every tile size in use, and quick on the reference path."""

GROWTH = 512
"""Steps in which a size that `Op.shrink` cut grows again: whole groups and tiles, so that its remainders stay those of the whole size."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation.

    Attributes:
        arguments: the inputs, declared (see `arguments`): shapes, dtypes, storage order. The torch schema, `describe`, `guard` and `like` come
            from them.
        returns: the tensors it produces, () for an operation that only writes into its arguments.
        reference: ``reference(*arguments)`` -> the output, a tuple of them, or None (in place); plain torch, float32 inside.
        values: axes that are computed from the arguments: axis -> an expression of sizes and arguments.
        rules: constraints between arguments that declarations cannot express. Each is a function whose parameters name the sizes, axes and
            arguments that it checks; it returns None or an error message. Rules with a parameter that a plan does not fix run at every planned
            call.
        inputs: ``inputs(problem, seed, device)`` -> the arguments, as a list, for tests, verification and benchmarks.
        check: ``check(problem)`` -> why its values are inconsistent (heads not divisible by KV heads), None if they are not. Open axes have no
            value.
        bucket: the axis whose sizes a plan divides into buckets.
        last_bucket: the size on that axis that stands for all calls above the largest bucket's.
        shrink: ``shrink(problem)`` -> the smaller problem that verification runs for it (same code path, less work), its sizes with the
            remainders of the whole ones by whatever kernels divide them by, 512 at most; None caps the bucket axis at 257.
        pack: ``pack(kernel, arguments)`` -> the arguments as that kernel takes them, for operations whose weights are packed for a layout:
            `inputs` and `reference` hold the neutral QuantTensor, kernels a list of tensors.
        unplanned: layouts of the weights that a call without a plan passes, for operations with packed weights.
        weights: ``weights(problem)`` -> the (N, K) of each packed weight, from which plans compute the bytes of layouts; None: one weight of
            the axes n and k.
        ranks: the axis with the number of processes that call it together (a collective operation); None = one.
        error: ``error(problem, arguments, outputs, references)`` -> the figure that `tolerance` limits; None = by metric.
    """

    name: str
    family: str
    summary: str
    axes: tuple[Axis, ...]
    arguments: tuple[Argument, ...]
    reference: Callable[..., Any]
    inputs: Callable[[Problem, int, str], list[Any]]
    cost: Callable[[Problem], Cost]
    tolerance: Callable[[Problem], Tolerance]
    examples: tuple[str, ...]
    bench: tuple[str, ...]
    returns: tuple[Tensor, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    rules: tuple[Callable[..., str | None], ...] = ()
    check: Callable[[Problem], str | None] | None = None
    bucket: str | None = None
    last_bucket: int = LAST_BUCKET
    shrink: Callable[[Problem], Problem] | None = None
    error: Callable[..., float] | None = None
    pack: Callable[[Any, Sequence[Any]], list[Any]] | None = None
    unplanned: frozenset[str] | None = None
    weights: Callable[[Problem], Sequence[tuple[int, int]]] | None = None
    ranks: str | None = None
    module: str = ""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The arguments, parsed into torch schema parameters."""
        from gristmill.kernel_registry.arguments import parameters

        return parameters(self.arguments)

    @cached_property
    def schema(self) -> str:
        """The arguments in torch schema syntax, in-place ones marked ``(a!)``: ``Tensor x, Tensor weight, float eps``."""
        return ", ".join(map(str, self.parameters))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the tensors it produces."""
        return tuple(tensor.name for tensor in self.returns)

    @cached_property
    def Call(self) -> Any:
        """The class of its calls (`call.Call`): ``op.Call(*arguments, *outputs)``."""
        from gristmill.kernel_registry.call import call_class

        return call_class(self)

    @cached_property
    def _functions(self) -> Functions:
        from gristmill.kernel_registry.argument_functions import Functions

        return Functions(self)

    @property
    def source(self) -> str:
        """The Python source of `describe`, `like` and the guards, generated from the declarations."""
        return self._functions.source

    def describe(self, *arguments: Any, **named: Any) -> Problem:
        """The problem that a call is; ValueError or TypeError for arguments that do not fit, with the name of the argument,
        the expected and the actual value."""
        return self.problem(self._functions.describe(*arguments, **named))

    def like(self, *arguments: Any, **named: Any) -> tuple[tuple[Any, Any], ...]:
        """((shape, dtype), ...) of the outputs; runs under fake tensors."""
        return self._functions.like(*arguments, **named)

    def guard(self, static: Problem, layout: Layout | None = None) -> Callable[..., int]:
        """``guard(call)`` for the calls of a plan -> the call's size on the bucket axis, read from host shapes. layout: that of its packed weights,
        if it is known.

        It raises ValueError for a call that does not match `static`. It runs at every planned call, costs a few attribute reads,
        and keeps kernels from accessing memory outside their buffers.
        """
        return self._functions.guard(static, layout)

    @cached_property
    def dynamic(self) -> frozenset[str]:
        """Names of the axes that change from call to call."""
        return frozenset(axis.name for axis in self.axes if axis.dynamic)

    def world(self, problem: Problem) -> int:
        """The number of processes that call `problem` together."""
        return 1 if self.ranks is None else problem.integer(self.ranks)

    def test_problems(self, kernel: Kernel) -> list[str]:
        """The problems that `kernel` is tested on: the operation's examples and its own, as far as it accepts them."""
        texts = dict.fromkeys((*self.examples, *kernel.examples))
        return [text for text in texts if kernel.accepts(self.problem(text)) is None]

    def verification(self, problem: Problem, kernel: Kernel, config: Config) -> Problem:
        """The problem that is run to verify `kernel` with the configuration that it has for `problem`.

        The smaller problem of `shrink`; where the configuration does not fit that one, with one of its sizes as much larger as
        need be; and `problem` itself where that is not enough.
        """
        small = self._smaller(problem)
        return next((p for p in self._growing(small, problem) if kernel.takes(p, config)), problem)

    def _smaller(self, problem: Problem) -> Problem:
        if self.shrink is not None:
            return self.shrink(problem)
        if self.bucket is None:
            return problem
        return problem.with_values(**{self.bucket: min(problem.integer(self.bucket), VERIFIED_ROWS)})

    def _growing(self, small: Problem, whole: Problem) -> Iterator[Problem]:
        """`small`, then with each of its smaller sizes in turn as in larger and larger parts of `whole`, static sizes first."""
        yield small
        sizes = [
            (axis.name, small.integer(axis.name), whole.integer(axis.name))
            for axis in sorted(self.axes, key=lambda axis: axis.dynamic)
            if axis.kind == "int"
        ]
        for name, part, size in sizes:
            for larger in (*range(part + GROWTH, size, GROWTH), *((size,) if size > part else ())):
                grown = small.with_values(**{name: larger})
                if self.check is None or self.check(grown) is None:
                    yield grown

    def problem(self, source: str | Problem | Mapping[str, object]) -> Problem:
        """A problem of this operation from its text, its axis values or another Problem; AxisError says what is wrong with it."""
        if isinstance(source, str):
            parsed = self._parse(source)
        elif isinstance(source, Problem):
            if source.op != self.name:
                raise AxisError(f"{self.name}: got a problem of {source.op}: {source}")
            parsed = make_problem(self.name, self.axes, source.as_dict())
        else:
            parsed = make_problem(self.name, self.axes, source)
        wrong = None if self.check is None else self.check(parsed)
        if wrong is not None:
            raise AxisError(f"{self.name}: {wrong}")
        return parsed

    @cached_property
    def _parse(self) -> Callable[[str], Problem]:
        """`parse_problem`, which remembers the texts of the last problems: stores repeat them."""
        return lru_cache(maxsize=4096)(partial(parse_problem, self.name, self.axes))

    def static(self, problem: Problem) -> Problem:
        """`problem` with its dynamic axes open: what a plan is made for."""
        return problem.with_values(**{axis.name: None for axis in self.axes if axis.dynamic})

    def at_bucket(self, static: Problem, size: int) -> Problem:
        """The concrete problem that stands for a bucket whose upper bound is `size`."""
        stated = {name: value for name, value in static.values if value is not None}
        if self.bucket is not None:
            stated[self.bucket] = self.last_bucket if size == LAST_BUCKET else size
        for axis in self.axes:
            if axis.dynamic and axis.name not in stated:
                stated[axis.name] = max(size, axis.minimum)
        return self.problem(stated)
