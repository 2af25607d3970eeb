"""The functions of an operation that follow from its declared arguments, and the checks of the declarations."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import cached_property
from keyword import iskeyword
from math import isfinite, prod
from typing import Any
from zlib import crc32

from gristmill.kernel_registry import argument_values
from gristmill.kernel_registry.argument_checks import Check, Checks, Step
from gristmill.kernel_registry.argument_names import Shape, names_in
from gristmill.kernel_registry.arguments import Declared, Scalar, Tensor, Weight
from gristmill.kernel_registry.dtypes import TORCH_NAMES
from gristmill.kernel_registry.problem import Problem

SCOPE = {name: value for name, value in vars(argument_values).items() if not name.startswith("_")}
SCOPE |= {"prod": prod, "isfinite": isfinite}
"""The functions that the generated source calls."""

SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
RESERVED = frozenset({"plan", "out", "inf", "nan"})
"""Names that no argument may have: keyword arguments of every operation, and float literals of torch schemas. An output may be
named ``out``."""


def check_declared(op: Declared) -> None:
    """ValueError for declarations from which no torch schema or no functions can be generated. Does not need torch."""
    names = [item.name for item in (*op.arguments, *op.returns)]
    for name in (op.name, *names):
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()) or iskeyword(name):
            raise ValueError(f"{op.name}: {name!r} is no name for an operation, an argument or an output")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{op.name}: {', '.join(repeated)}: declared twice")
    if reserved := sorted(RESERVED.intersection(item.name for item in op.arguments)):
        raise ValueError(f"{op.name}: {', '.join(reserved)}: no argument may have this name")
    for item in (*op.arguments, *op.returns):
        if isinstance(item, Scalar):
            _check_scalar(op.name, item)
        elif isinstance(item, Tensor | Weight):
            _check_shape(op.name, item)
    defaults = [parameter.default is not None for parameter in op.parameters]
    if defaults != sorted(defaults):
        raise ValueError(f"{op.name}: an argument with a default stands before one without")
    Functions(op)


def _check_scalar(op: str, item: Scalar) -> None:
    if item.kind not in SCALARS:
        raise ValueError(f"{op}: {item.name} must be one of {', '.join(SCALARS)}, got {item.kind!r}")
    value = item.default
    fits = value is None or type(value) is SCALARS[item.kind]
    if isinstance(value, float):
        fits = fits and isfinite(value)
    if isinstance(value, str):
        fits = fits and value.isascii() and value.isprintable() and not set(value) & set("\"'\\")
    if not fits:
        raise ValueError(f"{op}: {item.name} is {item.kind}, and {value!r} is no default for it")


def _check_shape(op: str, item: Tensor | Weight) -> None:
    for size in Shape(item.shape).sizes:
        try:
            names_in(size)
        except SyntaxError as error:
            raise ValueError(f"{op}: {item.name} has a size {size!r}: {error.msg}") from error


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
                lines += ["if not (", f"    {test}", "):", "    raise fault(locals())"] if tests else []
                lines.append(step)
                tests = {}
        self.source = "\n    ".join(lines) + "\n"
        file = f"<gristmill {crc32(self.source.encode()):08x}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        self._code = compile(self.source, file, "exec")

    def made(self, scope: dict[str, Any]) -> Callable[..., Any]:
        """The function in a scope."""
        made: dict[str, Callable[..., Any]] = {}
        exec(self._code, scope | {"fault": lambda values: self._fault(scope | values)}, made)
        return made.popitem()[1]

    def _fault(self, values: dict[str, Any]) -> Exception:
        """The error of the first check that does not hold. values: of the variables so far."""
        for check in self._checks:
            absent = check.given and values[check.given] is None
            if not absent and not eval(check.condition, values):
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
        if taken := {*SCOPE, "where", "call", "fault"} & {*(p.name for p in op.parameters), *op.outputs}:
            raise ValueError(
                f"{op.name}: {', '.join(sorted(taken))}: the generated checks use this name; choose another"
            )
        self._op, self._planned = op, Checks(op, planned=True)
        parameters = ", ".join(parameter.python for parameter in op.parameters)
        self._describe = Function(f"describe({parameters})", *Checks(op).all())
        self._like = Function(f"like({parameters})", *Checks(op).outputs())
        self._guard = Function("guard(call)", *self._planned.all())
        self.source = "\n\n".join(made.source for made in (self._describe, self._like, self._guard))

    @cached_property
    def _scope(self) -> dict[str, Any]:
        import torch

        scope = {f"rule_{index}": rule for index, rule in enumerate(self._op.rules)}
        scope |= {f"d_{name}": getattr(torch, text) for name, text in TORCH_NAMES.items()}
        return SCOPE | {"where": self._op.name} | scope

    @cached_property
    def describe(self) -> Callable[..., dict[str, Any]]:
        """``describe(*arguments)`` -> axis values."""
        return self._describe.made(self._scope)

    @cached_property
    def like(self) -> Callable[..., tuple[tuple[Any, Any], ...]]:
        """``like(*arguments)`` -> ((shape, dtype), ...) of the outputs."""
        return self._like.made(self._scope)

    def guard(self, problem: Problem) -> Callable[..., int]:
        """``guard(call)`` for the calls of a plan -> the call's size on the bucket axis."""
        scope = self._scope | {"where": f"{self._op.name} planned for {problem}"}
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
