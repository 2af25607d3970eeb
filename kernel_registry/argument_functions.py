"""The functions of an operation that follow from its declared arguments, and the checks of the declarations."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from keyword import iskeyword
from math import isfinite, prod
from types import CodeType
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
    for item in op.arguments:
        if isinstance(item, Scalar):
            _check_scalar(op.name, item)
    for item in (*op.arguments, *op.returns):
        if isinstance(item, Tensor | Weight):
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


class Functions:
    """`describe`, `like` and the guards of an operation, generated from its declarations as Python source and compiled once.

    Source, not a walk over the declarations, because they run at every call: the guard of a plan is one condition. Where it does not
    hold, `fault` walks over the checks. In the source ``s_<name>`` is a size or another axis value, ``d_<name>`` a torch dtype,
    ``h_<number>`` a constant of a plan. ``inspect.getsource`` and tracebacks show it.
    """

    def __init__(self, op: Declared) -> None:
        self.op = op
        parameters = ", ".join(p.name + ("" if p.default is None else f"={p.default}") for p in op.parameters)
        checks, outlined, planned = Checks(op), Checks(op), Checks(op, planned=True)
        outputs = outlined.outputs()
        self._names, self._constants = checks.names, planned.constants
        self._described, self._outlined, self._planned = checks.all(), outlined.steps, planned.all()
        read = re.findall(r"\w+", " ".join(s if isinstance(s, str) else s.condition for s in planned.steps))
        attributes = [name for name in (*self._names.arguments, *op.outputs) if name in read]
        self._planned[:0] = [f"{name} = call.{name}" for name in attributes]
        self._describe = function(f"describe({parameters})", self._described, self._names.axis_values())
        self._like = function(f"like({parameters})", self._outlined, outputs)
        self._guard = function("guard(call)", self._planned, planned.bucket_size())
        self.source = "\n\n".join((self._describe, self._like, self._guard))
        if taken := {*SCOPE, "where", "call", "fault"} & {*self._names.arguments, *op.outputs}:
            raise ValueError(
                f"{op.name}: {', '.join(sorted(taken))}: the generated checks use this name; choose another"
            )

    @cached_property
    def _scope(self) -> dict[str, Any]:
        import torch

        scope = SCOPE | {"where": self.op.name}
        scope |= {f"rule_{index}": rule for index, rule in enumerate(self.op.rules)}
        scope |= {f"d_{name}": getattr(torch, text) for name, text in TORCH_NAMES.items()}
        for axis in self.op.axes:
            if axis.kind == "dtype":
                names = self._names.dtypes(axis.name)
                scope[f"names_{axis.name}"] = {scope[f"d_{name}"]: name for name in names}
        return scope

    @cached_property
    def describe(self) -> Callable[..., dict[str, Any]]:
        """``describe(*arguments)`` -> axis values."""
        return _made(self._describe, self._described, self._scope)

    @cached_property
    def like(self) -> Callable[..., tuple[tuple[Any, Any], ...]]:
        """``like(*arguments)`` -> ((shape, dtype), ...) of the outputs."""
        return _made(self._like, self._outlined, self._scope)

    def guard(self, problem: Problem) -> Callable[..., int]:
        """``guard(call)`` for the calls of a plan -> the call's size on the bucket axis."""
        scope = self._scope | {"where": f"{self.op.name} planned for {problem}"}
        for axis in self.op.axes:
            if axis.kind == "flags":
                scope |= {f"s_{flag}": flag in problem.flags(axis.name) for flag in axis.choices}
            elif not axis.dynamic:
                scope[f"s_{axis.name}"] = problem[axis.name]
            if axis.kind == "dtype":
                scope[f"d_{axis.name}"] = scope[f"d_{problem[axis.name]}"]
        for name, text in self._constants.items():
            scope[name] = eval(text, scope)
        return _made(self._guard, self._planned, scope)


def function(head: str, steps: Sequence[Step], result: str) -> str:
    """Source of a function that makes checks, all those between two statements at once, and returns `result`."""
    lines: list[str] = []
    tests: dict[str, list[str]] = {}  # what makes conditions hold -> the conditions
    for step in (*steps, f"return {result}"):
        if isinstance(step, Check):
            if not step.implied:
                absent = f"{step.given} is None or " if step.given else ""
                tests.setdefault(absent or step.condition, [absent]).append(f"({step.condition})")
            continue
        if tests:
            parts = [
                f"({given}{' and '.join(all_of)})" if given else all_of[0]
                for given, *all_of in tests.values()
            ]
            lines += ["if not (", "    " + "\n        and ".join(parts), "):", "    raise fault(locals())"]
            tests = {}
        lines.append(step)
    return "\n    ".join([f"def {head}:", *lines]) + "\n"


def _made(source: str, steps: Sequence[Step], scope: dict[str, Any]) -> Callable[..., Any]:
    """The function with this source."""

    def fault(values: dict[str, Any]) -> Exception:
        """The error of the first check that does not hold."""
        values = scope | values
        for step in steps:
            if isinstance(step, str):
                exec(step, values)
            elif (not step.given or values[step.given] is not None) and not eval(step.condition, values):
                message = eval(f'f"""{step.message}"""', values)
                return step.kind(f"{values['where']}: {message}")
        raise AssertionError(f"{values['where']}: no check fails: {source}")

    made: dict[str, Callable[..., Any]] = {}
    exec(_code(source), scope | {"fault": fault}, made)
    return made.popitem()[1]


@cache
def _code(source: str) -> CodeType:
    file = f"<gristmill {crc32(source.encode()):08x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")
