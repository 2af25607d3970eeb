"""Functions generated from the declared arguments of an operation: their source is assembled and compiled once."""

from __future__ import annotations

import linecache
from keyword import iskeyword
from math import isfinite, prod
from typing import Any
from zlib import crc32

from gristmill.kernel_registry import argument_checks
from gristmill.kernel_registry.argument_names import Names, Shape, names_in
from gristmill.kernel_registry.argument_source import describe_source
from gristmill.kernel_registry.arguments import Declared, Scalar, Tensor, Weight
from gristmill.kernel_registry.dtypes import TORCH_NAMES
from gristmill.kernel_registry.guard_source import guard_source, like_source

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
    compile(source_text(op), op.name, "exec")


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


def source_text(op: Declared) -> str:
    """The source of ``describe``, ``like`` and ``make_guard``."""
    dtypes = {item.dtype for item in (*op.arguments, *op.returns) if isinstance(item, Tensor)}
    head = ["import torch", "", f"where = {op.name!r}"]
    for axis in op.axes:
        if axis.kind == "dtype":
            choices = [name for name in axis.choices or TORCH_NAMES if name in TORCH_NAMES]
            choice = ", ".join(f"{name!r}: torch.{TORCH_NAMES[name]}" for name in choices)
            head += [f"dtypes_{axis.name} = {{{choice}}}"]
            head += [f"names_{axis.name} = {{dtype: name for name, dtype in dtypes_{axis.name}.items()}}"]
    head += [f"d_{name} = torch.{TORCH_NAMES[name]}" for name in sorted(dtypes.intersection(TORCH_NAMES))]
    gap = ["", ""]
    return "\n".join([*head, *gap, *describe_source(op), *gap, *like_source(op), *gap, *guard_source(op), ""])


def compiled(op: Declared) -> dict[str, Any]:
    """The functions ``describe``, ``like`` and ``make_guard`` of an operation, and their text as ``source``."""
    source = source_text(op)
    scope: dict[str, Any] = {
        name: value for name, value in vars(argument_checks).items() if not name.startswith("_")
    }
    scope |= {"prod": prod, "isfinite": isfinite, "source": source}
    scope |= {f"rule_{index}": rule for index, rule in enumerate(op.rules)}
    conflicts = {"torch", "where", "values", "problem", "lead", "wrong", *scope} & {
        *Names(op).arguments,
        *op.outputs,
    }
    if conflicts:
        raise ValueError(
            f"{op.name}: {', '.join(sorted(conflicts))}: the generated checks use this name; choose another"
        )
    file = f"<gristmill {op.name} {crc32(source.encode()):08x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return scope
