"""Parsed shapes and expressions of declared arguments, and checks of declarations."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from keyword import iskeyword
from math import isfinite

from gristmill.kernel_registry.arguments import Declared, Scalar, Tensor, Weight

SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
RESERVED = frozenset({"plan", "out", "inf", "nan"})
"""Names that no argument may have: keyword arguments of every operation, float literals of schemas. An output may be named ``out``."""


@cache
def names_in(text: str) -> tuple[str, ...]:
    """The names in an expression."""
    nodes = ast.walk(ast.parse(text, mode="eval"))
    names = [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in ("min", "max")]
    return tuple(dict.fromkeys(names))


def is_name(size: str) -> bool:
    """Whether a size is a plain name, not a number or an expression."""
    return size.isidentifier()


class Shape:
    """A parsed shape declaration.

    flat: only the number of elements is declared. leading: any leading dimensions are allowed before `sizes`, which are the size
    of each dimension, or the number of elements.
    """

    def __init__(self, text: str) -> None:
        self.flat, self.leading = text.startswith("("), text.startswith("...")
        self.sizes = (text,) if self.flat else tuple(text.removeprefix("...").split())

    def places(self) -> Iterator[tuple[int, str]]:
        """(index, size) of each dimension, the index counted from the end after leading dimensions. Empty for a flat shape."""
        if not self.flat:
            back = len(self.sizes) if self.leading else 0
            yield from ((place - back, size) for place, size in enumerate(self.sizes))


def solve(op: str, text: str, name: str) -> tuple[str, str]:
    """The operator and the operand that leave `name` of an expression that contains it: ``2*n`` / 2, ``n+2`` - 2."""
    tree = ast.parse(text, mode="eval").body
    if isinstance(tree, ast.Name):
        return "", ""
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult | ast.Add):
        sides = [ast.unparse(tree.left), ast.unparse(tree.right)]
        if sides.count(name) == 1:
            return " // " if isinstance(tree.op, ast.Mult) else " - ", sides[1 - sides.index(name)]
    raise ValueError(f"{op}: {name} cannot be determined from a size {text}")


def check_declared(op: Declared) -> None:
    """ValueError for declarations from which no torch schema can be generated. Does not need torch."""
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
        for size in Shape(item.shape).sizes if isinstance(item, Tensor | Weight) else ():
            try:
                names_in(size)
            except SyntaxError as error:
                raise ValueError(f"{op.name}: {item.name} has a size {size!r}: {error.msg}") from error
    if (defaults := [parameter.default is not None for parameter in op.parameters]) != sorted(defaults):
        raise ValueError(f"{op.name}: an argument with a default stands before one without")


def _check_scalar(op: str, item: Scalar) -> None:
    if item.kind not in SCALARS:
        raise ValueError(f"{op}: {item.name} must be one of {', '.join(SCALARS)}, got {item.kind!r}")
    value, quoted = item.default, item.default if isinstance(item.default, str) else ""
    fits = value is None or type(value) is SCALARS[item.kind]
    fits &= not isinstance(value, float) or isfinite(value)
    if not fits or not quoted.isascii() or not quoted.isprintable() or set(quoted) & set("\"'\\"):
        raise ValueError(f"{op}: {item.name} is {item.kind}, and {value!r} is no default for it")
