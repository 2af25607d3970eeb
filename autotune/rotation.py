"""Argument lists for timing: cold, rotated, with new content at the same addresses, and checked after use.

The timed calls are the checked calls. `refresh` gives every argument list new content in place and
fills the outputs with poison; after any calls, `check` compares the lists with the reference for that
content. This detects a kernel that caches by address, skips writes, changes its inputs or has not finished; and a kernel
cannot distinguish a checked round from any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as _now
from typing import Any, NamedTuple

import torch

from gristmill.autotune.guard import Guarded, same_bits, tensors, written
from gristmill.autotune.metrics import error_of
from gristmill.autotune.timing import list_count
from gristmill.autotune.verify import kernel_arguments, run_reference
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

CONTENTS = 2
"""Number of different contents among the argument lists: enough to distinguish a stale result from a correct one."""

PATIENCE = 0.25
"""Seconds that generating new contents may take. If it takes longer, the initial contents are reassigned, and only results
cached by address are detected, not those cached by a fingerprint of the content."""


@dataclass
class _Set:
    """One call, and its arguments and outputs.

    Attributes:
        content: index of its content.
        guards: the guard bands of all tensors that it may write.
    """

    call: Any
    arguments: list[Any]
    outputs: list[torch.Tensor]
    guards: list[Guarded]
    content: int


class _Dependency(NamedTuple):
    """Makes a call depend on the one before it.

    Attributes:
        flag: the last byte of this list's result.
        element: the first number of its input.
        kept: a copy of that number.
    """

    flag: torch.Tensor
    element: torch.Tensor
    kept: torch.Tensor


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        wrong: "" or a sentence.
        error: the operation's figure, None when nothing was compared.
        repeatable: equal contents gave equal bits.
    """

    wrong: str
    error: float | None
    repeatable: bool


@dataclass(frozen=True)
class Contents:
    """Contents of argument lists, before packing for a kernel: CONTENTS lists of arguments, and the outputs of the reference for each.

    Never written, so rotations may share one.

    Attributes:
        base: the arguments of seed 0.
        seconds: the time to generate them.
    """

    base: Sequence[Any]
    neutral: Sequence[Sequence[Any]]
    references: Sequence[Sequence[torch.Tensor]]
    seconds: float

    @staticmethod
    def first(op: Op, problem: Problem, device: str) -> Contents:
        """The initial contents of a rotation."""
        begin = _now()
        base = op.inputs(problem, 0, device)
        return Contents._of(op, problem, device, base, 0, begin)

    def later(self, op: Op, problem: Problem, device: str, seed: int) -> Contents:
        """New contents, from `seed` and the seeds after it."""
        return Contents._of(op, problem, device, self.base, seed, _now())

    @staticmethod
    def _of(op: Op, problem: Problem, device: str, base: Sequence[Any], seed: int, begin: float) -> Contents:
        neutral = [
            _content(op, problem, device, base, content_seed) for content_seed in range(seed, seed + CONTENTS)
        ]
        references = [run_reference(op, arguments) for arguments in neutral]
        return Contents(base, neutral, references, _now() - begin)


class Rotation:
    """Argument lists of `problem` as `kernel` takes them, outputs included.

    Args:
        hot: one list only, so that calls find their arguments in the cache. Otherwise lists amount to several times the last cache, and calls
            that go around them find their arguments in memory.
        contents: initial contents, to share them among kernels; None = generated here.
    """

    def __init__(
        self,
        op: Op,
        kernel: Kernel,
        problem: Problem,
        device: str,
        *,
        hot: bool = False,
        contents: Contents | None = None,
    ) -> None:
        self.op, self.problem, self.device = op, problem, device
        self._kernel, self._seed = kernel, 0
        contents = contents or Contents.first(op, problem, device)
        begin = _now()
        self._take(contents)
        self._quick = contents.seconds + _now() - begin < PATIENCE
        self._dependencies: list[_Dependency] = []
        self.sets = [
            self._set(index % CONTENTS)
            for index in range(list_count(op.cost(problem).bytes, device, hot=hot))
        ]
        self.turn = 0

    def next(self) -> Any:
        """The next call (`Op.Call`)."""
        argument_set = self.sets[self.turn]
        self.turn = (self.turn + 1) % len(self.sets)
        return argument_set.call

    @property
    def in_place(self) -> bool:
        """Whether a call changes its own arguments, so that a second call has other inputs."""
        return any(p.mutable and p.name != "workspace" for p in self.op.parameters)

    def refresh(self) -> None:
        """Write other content at the same addresses, poison all outputs, and restart the rotation."""
        if self._quick:
            self._take(self._contents.later(self.op, self.problem, self.device, self._seed))
        for argument_set in self.sets:
            argument_set.content = (argument_set.content + 1) % CONTENTS
        self.restore()

    def restore(self) -> None:
        """Write the content of every list again and poison all outputs. On a GPU this is queued on
        the current stream and does not synchronise."""
        for argument_set in self.sets:
            for guard in argument_set.guards:
                guard.renew()
        self.touch()

    def tie(self) -> None:
        """Make the next call's input depend on the last call's output: an operation that reads the last byte of that output rewrites
        the first element of the input with its own value. No read of the input can start before."""
        torch.where(
            self._dependencies[self.turn - 1].flag,
            self._dependencies[self.turn].kept,
            self._dependencies[self.turn].kept,
            out=self._dependencies[self.turn].element,
        )

    def tied(self) -> str:
        """Prepare for `tie`: "", or why no input of this operation can be made to depend on a result."""
        if self._dependencies:
            return ""  # only once: graphs refer to them
        dependencies = []
        for argument_set in self.sets:
            results, element = self._results(argument_set), _element(self.op, argument_set.arguments)
            if element is None:
                return f"{self.op.name} reads nothing that it does not write too"
            if not results or not results[0].numel():
                return "nothing is written"
            flag = results[0].view(-1)[-1:].view(torch.uint8)[-1:].view(torch.bool)
            dependencies.append(_Dependency(flag, element, element.clone()))
        self._dependencies = dependencies
        return ""

    def touch(self) -> None:
        """Write the content of every list again and restart the rotation: a refresh without new content."""
        for argument_set in self.sets:
            for argument, master in zip(
                argument_set.arguments, self._masters[argument_set.content], strict=True
            ):
                for target, source in zip(tensors(argument), tensors(master), strict=True):
                    target.copy_(source)
        for dependency in self._dependencies:
            dependency.kept.copy_(dependency.element)
        self.turn = 0

    def snapshot(
        self, count: int, into: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Copies of the outputs of the first `count` lists, the last one first: it had the least time to finish after its call returned.

        With `into`, an earlier snapshot is overwritten and nothing is allocated, which might wait for the whole device.
        """
        if into is None:
            into = [
                [torch.empty_like(t) for t in self._results(argument_set)]
                for argument_set in self.sets[:count]
            ]
        for argument_set, copies in reversed([*zip(self.sets[:count], into, strict=True)]):
            for copy, result in zip(copies, self._results(argument_set), strict=True):
                copy.copy_(result)
        return into

    def check(self, results: Sequence[Sequence[torch.Tensor]]) -> Finding:
        """Compare snapshots of the first lists with the reference, and check guard bands and inputs."""
        error, repeatable = 0.0, True
        first_results: dict[int, Sequence[torch.Tensor]] = {}
        limit = self.op.tolerance(self.problem).limit
        for argument_set, result in zip(self.sets, results, strict=False):
            if wrong := self._trespass(argument_set):
                return Finding(wrong, None, repeatable)
            if not all(map(same_bits, self._results(argument_set), result)):
                return Finding("its results changed after the call had returned", None, repeatable)
            earlier = first_results.setdefault(argument_set.content, result)
            if earlier is not result and all(map(same_bits, earlier, result)):
                continue  # compared already
            repeatable = repeatable and earlier is result
            contents = self._contents
            figure = error_of(
                self.op,
                self.problem,
                contents.neutral[argument_set.content],
                result,
                contents.references[argument_set.content],
            )
            error = max(error, figure)
            if not figure <= limit:
                return Finding(f"error {figure:.3g} is over the tolerance {limit:.3g}", figure, repeatable)
        return Finding("", error, repeatable)

    @property
    def references(self) -> Sequence[Sequence[torch.Tensor]]:
        """The outputs of the reference for each content."""
        return self._contents.references

    def _take(self, contents: Contents) -> None:
        """Use other contents from now on: packs them, but does not write them to the lists."""
        self._contents = contents
        self._seed += CONTENTS
        self._masters = [kernel_arguments(self.op, self._kernel, arguments) for arguments in contents.neutral]

    def _results(self, argument_set: _Set) -> list[torch.Tensor]:
        return [*argument_set.outputs, *written(self.op, argument_set.arguments)]

    def _trespass(self, argument_set: _Set) -> str:
        for guard in argument_set.guards:
            if not guard.intact():
                return f"wrote outside {guard.name}"
        for parameter, argument, master in zip(
            self.op.parameters, argument_set.arguments, self._masters[argument_set.content], strict=True
        ):
            if not parameter.mutable and not all(map(same_bits, tensors(argument), tensors(master))):
                return f"changed its input {parameter.name}"
        return ""

    def _set(self, content: int) -> _Set:
        arguments: list[Any] = []
        guards: list[Guarded] = []
        for parameter, master in zip(self.op.parameters, self._masters[content], strict=True):
            if parameter.mutable and isinstance(master, torch.Tensor):
                guards.append(Guarded.make(parameter.name, master.shape, master.dtype, master.device))
                guards[-1].tensor.copy_(master)
                arguments.append(guards[-1].tensor)
            else:
                arguments.append(_copy(master))
        outputs = []
        if self.op.outputs:
            for name, (shape, dtype) in zip(self.op.outputs, self.op.like(*arguments), strict=True):
                guards.append(Guarded.make(name, shape, dtype, self.device))
                outputs.append(guards[-1].tensor)
        return _Set(self.op.Call(*arguments, *outputs), arguments, outputs, guards, content)


def _element(op: Op, arguments: Sequence[Any]) -> torch.Tensor | None:
    """The first element of the first input that is not written, a floating-point one if there is any."""
    read = [
        t
        for p, a in zip(op.parameters, arguments, strict=True)
        if not p.mutable
        for t in tensors(a)
        if t.numel() and t.dim()
    ]
    source = next((t for t in read if t.dtype.is_floating_point), next(iter(read), None))
    return None if source is None else source[(0,) * (source.dim() - 1)][:1]


def _content(op: Op, problem: Problem, device: str, base: Sequence[Any], seed: int) -> Sequence[Any]:
    """Arguments of the same work as `base`: where a seed decides more than numbers (lengths, block tables, experts), those of
    `base` with their numbers moved along the rows."""
    if seed == 0:
        return base
    candidate = op.inputs(problem, seed, device)
    if all(
        _same_work(argument, new_argument) for argument, new_argument in zip(base, candidate, strict=True)
    ):
        return candidate
    return [_rolled(argument, seed) for argument in base]


def _same_work(a: Any, b: Any) -> bool:
    """Whether two arguments differ in floating-point values at most. Other arguments than tensors are not compared."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same_work, a, b))
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and (a.dtype.is_floating_point or torch.equal(a, b))
    return True


def _rolled(argument: Any, by: int) -> Any:
    """Floating-point tensors rolled along the last dimension, so that guard bands between rows stay where they are."""
    if isinstance(argument, list | tuple):
        return [_rolled(item, by) for item in argument]
    if (
        isinstance(argument, torch.Tensor)
        and argument.dtype.is_floating_point
        and argument.dim()
        and argument.shape[-1] > 1
    ):
        as_float = argument.float() if argument.dtype.itemsize == 1 else argument
        return torch.roll(as_float, 1 + by % (argument.shape[-1] - 1), -1).to(argument.dtype)
    return argument


def _copy(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.clone()
    return [_copy(item) for item in argument] if isinstance(argument, list | tuple) else argument
