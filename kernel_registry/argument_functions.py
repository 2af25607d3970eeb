"""`describe`, `like` and the guards of an operation, generated from its declared arguments; and the functions that they call."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from math import isfinite, prod
from types import CodeType
from typing import Any
from zlib import crc32

from gristmill.kernel_registry.argument_checks import Check, Checks, Step
from gristmill.kernel_registry.arguments import Declared
from gristmill.kernel_registry.dtypes import TORCH_NAMES, dtype_name
from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme


def vectors(x: Any) -> bool:
    """Whether the last dimension of x is contiguous."""
    return bool(x.stride(-1) == 1 or x.shape[-1] <= 1)


def rows(x: Any) -> bool:
    """Whether the last dimension of x is contiguous and the leading ones flatten to rows of one stride."""
    if not vectors(x):
        return False
    stride = None
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1 and stride is not None and step != stride:
            return False
        if size != 1 or stride is not None:
            stride = step * size
    return True


def matrix(x: Any) -> bool:
    """Whether x is contiguous, or at most two-dimensional with a contiguous last dimension."""
    return bool(x.is_contiguous() or (x.dim() <= 2 and vectors(x)))


def strided(x: Any) -> bool:
    """True: any strides are allowed."""
    return True


def apart(x: Any) -> bool:
    """Whether no two elements of x share memory. Required of tensors that are written."""
    if _nested(zip(reversed(x.stride()), reversed(x.shape), strict=True)):  # the usual order
        return True
    return not x.numel() or _nested(sorted(zip(x.stride(), x.shape, strict=True)))


def _nested(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether the stride of each dimension (stride, size) is at least the span of those before it."""
    span = 1
    for step, size in dimensions:
        if size > 1:
            if step < span:
                return False
            span += step * (size - 1)
    return True


def value_of(value: Any) -> str:
    """A number, flag or string, or a tensor in their place, as messages print it."""
    return f"a tensor {list(value.shape)}" if hasattr(value, "shape") else repr(value)


def dense_or_quantized(where: str, name: str, declared: str, argument: Any) -> tuple[Any, str, bool]:
    """(weight, scheme, act-order) of a QuantTensor or of a list of one dense tensor; ValueError or TypeError otherwise.

    The scheme of packed tensors is not stored in them: they need the plan that they were packed for.
    """
    head = f"{where}: {name}"
    if not isinstance(argument, list | tuple):
        if not hasattr(argument, "scheme"):
            got = type(argument).__name__
            raise TypeError(f"{head} must be a QuantTensor or a list of tensors, got {got}")
        return argument, str(argument.scheme), argument.g_idx is not None
    if len(argument) != 1:
        raise ValueError(
            f"{head} has {len(argument)} packed tensors, from which the scheme cannot be derived; pass the plan they were packed "
            f"for, or one dense {declared} tensor in a list"
        )
    weight, scheme = argument[0], dtype_name(argument[0].dtype)
    if scheme not in ("fp32", "fp16", "bf16"):
        expected = f"a dense {name} is fp32, fp16 or bf16"
        raise TypeError(f"{where}: {expected}, got {scheme}; quantized weights need a plan")
    if not weight.is_contiguous():
        got = f"shape {list(weight.shape)} with strides {weight.stride()}"
        raise ValueError(f"{head} must be contiguous, got {got}; call .contiguous() first")
    return weight, scheme, False


def stated_size(where: str, name: str, declared: str, argument: Any, stated: Any) -> Any:
    """The number of rows of a weight: the stated one or, if that is 0, the one of its first tensor.

    Raises:
        ValueError: the tensors cannot hold that many rows, or the number of rows cannot be derived from them.
    """
    listed = isinstance(argument, list | tuple)
    if stated > 0 and listed and not argument:
        return stated
    first = argument[0] if listed else argument
    if not stated and len(first.shape) != len(declared.split()):
        raise ValueError(f"{where}: the number of rows of {name} cannot be derived from its packing; pass it")
    size = stated or first.shape[-2]
    nbytes = first.numel() * first.element_size()  # .nbytes has no symbolic sizes, as torch.compile has
    if size < 1 or (listed and size > 2 * nbytes):  # a row has at least half a byte
        raise ValueError(
            f"{where}: {name} has at least one row, and no more than its bytes can hold: not {size} in {list(first.shape)}"
        )
    return size


def code_bytes(scheme: str, sizes: tuple[int, ...]) -> int:
    """Bytes of the codes of a weight of the given sizes."""
    return QuantScheme.parse(scheme).code_bytes(sizes[-1]) * prod(sizes[:-1])


PREDICATES = (vectors, rows, matrix, strided, apart)
CALLED = (*PREDICATES, prod, isfinite, value_of, dense_or_quantized, stated_size, code_bytes)
SCOPE = {function.__name__: function for function in CALLED}
"""The functions that the generated source calls."""


class Function:
    """A function that makes checks, all those between two statements at once, and returns `result`. source: its text."""

    def __init__(self, head: str, steps: Sequence[Step], result: str) -> None:
        self._checks, lines = [step for step in steps if isinstance(step, Check)], [f"def {head}:"]
        tests: dict[str, list[str]] = {}  # what makes conditions hold -> the conditions
        for step in (*steps, f"return {result}"):
            if isinstance(step, Check) and not step.implied:
                absent = f"{step.given} is None or " if step.given else ""
                tests.setdefault(absent or step.condition, [absent]).append(f"({step.condition})")
            if isinstance(step, str):
                all_of = [f"({absent}{' and '.join(c)})" if absent else c[0] for absent, *c in tests.values()]
                test = "\n        and ".join(all_of)
                lines += ["if not (", f"    {test}", "):", "    raise fault(locals())"] * bool(tests) + [step]
                tests = {}
        self.source = "\n    ".join(lines) + "\n"

    @cached_property
    def _code(self) -> CodeType:
        """The source, compiled when the function is first made: a load needs the guards alone."""
        file = f"<gristmill {crc32(self.source.encode()):08x}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        return compile(self.source, file, "exec")

    def made(self, scope: dict[str, Any]) -> Callable[..., Any]:
        """The function in a scope."""
        made: dict[str, Callable[..., Any]] = {}
        exec(self._code, scope | {"fault": lambda values: self._fault(scope | values)}, made)
        return made.popitem()[1]

    def _fault(self, values: dict[str, Any]) -> Exception:
        """The error of the first check that does not hold. values: of the variables so far."""
        for check in self._checks:
            if not (check.given and values[check.given] is None or eval(check.condition, values)):
                message = eval(f'f"""{check.message}"""', values)
                return check.kind(f"{values['where']}: {message}")
        raise AssertionError(f"{values['where']}: no check fails in {self.source}")


class Functions:
    """`describe`, `like` and the guards of an operation, generated from its declarations as Python source and compiled once.

    Source, not a walk over the declarations, because they run at every call: the guard of a plan is one condition. In the source
    ``s_<name>`` is a size or another axis value, ``d_<name>`` a torch dtype, ``h_<number>`` a constant of a plan.
    ``inspect.getsource`` and tracebacks show it.
    """

    def __init__(self, op: Declared) -> None:
        if taken := {*SCOPE, "where", "call", "fault", "packed_count", "packed_as"} & {
            *(p.name for p in op.parameters),
            *op.outputs,
        }:
            wrong = f"{', '.join(sorted(taken))}: the generated checks use this name; choose another"
            raise ValueError(f"{op.name}: {wrong}")
        self._op, self._planned = op, Checks(op, planned=True)
        parameters = ", ".join(parameter.python for parameter in op.parameters)
        self._describe = Function(f"describe({parameters})", *Checks(op).all())
        self._like = Function(f"like({parameters})", *Checks(op).outputs())
        self._guard = Function("guard(call)", *self._planned.all())
        self.source = "\n\n".join(made.source for made in (self._describe, self._like, self._guard))

    @cached_property
    def _scope(self) -> dict[str, Any]:
        scope = {f"rule_{index}": rule for index, rule in enumerate(self._op.rules)}
        scope |= {f"d_{name}": getattr(import_module("torch"), text) for name, text in TORCH_NAMES.items()}
        return SCOPE | {"where": self._op.name} | scope

    @cached_property
    def describe(self) -> Callable[..., dict[str, Any]]:
        """``describe(*arguments)`` -> axis values."""
        return self._describe.made(self._scope)

    @cached_property
    def like(self) -> Callable[..., tuple[tuple[Any, Any], ...]]:
        """``like(*arguments)`` -> ((shape, dtype), ...) of the outputs."""
        return self._like.made(self._scope)

    def guard(self, problem: Problem, layout: Layout | None = None) -> Callable[..., int]:
        """``guard(call)`` for the calls of a plan -> the call's size on the bucket axis. layout: that of packed weights, where it is known."""
        scope = self._scope | {"where": f"{self._op.name} planned for {problem}"}
        scope |= {
            "packed_count": len(layout.slots) if layout else 0,
            "packed_as": layout.name if layout else "",
        }
        for axis in self._op.axes:
            if axis.kind == "flags":
                scope |= {f"s_{flag}": flag in problem.flags(axis.name) for flag in axis.choices}
            elif not axis.dynamic:
                scope[f"s_{axis.name}"] = problem[axis.name]
            if axis.kind == "dtype":
                scope[f"d_{axis.name}"] = scope[f"d_{problem[axis.name]}"]
        for text, name in self._planned.constants.items():
            scope[name] = eval(text, scope)
        return self._guard.made(scope)
