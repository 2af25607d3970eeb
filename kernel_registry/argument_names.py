"""Meaning of the names in the declared shapes, rules and computed axes of an operation.

Expressions are Python source. In it an argument has its own name, and ``s_<name>`` is a size or another axis value.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from gristmill.kernel_registry.arguments import Declared, Scalar, Tensor, Weight


def names_in(text: str) -> list[str]:
    """The names in an expression."""
    nodes = ast.walk(ast.parse(text, mode="eval"))
    names = [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in ("min", "max")]
    return list(dict.fromkeys(names))


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


class Extent(NamedTuple):
    """Where a call has a size: source of a dimension of an argument, and the operator and operand that leave the size of it."""

    name: str
    item: Tensor | Weight
    source: str
    operator: str = ""
    operand: str = ""


class Names:
    """The names of one operation.

    planned: a plan fixes the static axes. sizes: determined by shapes. static: axes that a plan fixes, and the arguments that its
    flags fix. stated: optional tensors whose presence a plan fixes. scalar_axes: scalars that are static axes.
    """

    def __init__(self, op: Declared, planned: bool = False) -> None:
        self.op, self.planned = op, planned
        self.axes = {axis.name: axis for axis in op.axes}
        self.arguments: tuple[str, ...] = tuple(a.name for a in op.arguments)
        self.tensors = [a for a in op.arguments if isinstance(a, Tensor)]
        self.weights = [a for a in op.arguments if isinstance(a, Weight)]
        self.scalars = [a for a in op.arguments if isinstance(a, Scalar)]
        self.shapes = {a.name: a.shape for a in op.arguments if isinstance(a, Tensor | Weight)}
        plain = [scalar.name for scalar in self.scalars if not scalar.states]
        self.sizes = {name for shape in self.shapes.values() for name in self.names_of(shape)} - {*plain}
        if any(Shape(shape).leading for shape in self.shapes.values()) and op.bucket is not None:
            self.sizes.add(op.bucket)
        flags = {flag for axis in op.axes if axis.kind == "flags" for flag in axis.choices}
        self.static = {axis.name for axis in op.axes if not axis.dynamic} | flags
        presence = flags | {axis.name for axis in op.axes if axis.kind == "bool"}
        self.stated = [t.name for t in self.tensors if t.optional and t.name in presence]
        self.scalar_axes = [n for n in plain if n in self.static and n not in {*self.sizes, *op.values}]
        dtypes = {axis.name for axis in op.axes if axis.kind == "dtype"} - {*self.arguments}
        self.values = self.sizes.union(op.values, dtypes, self.static if planned else ())

    def names_of(self, shape: str) -> list[str]:
        """The names in a shape."""
        return list(dict.fromkeys(name for size in Shape(shape).sizes for name in names_in(size)))

    def only_in(self, argument: str) -> set[str]:
        """Sizes that only this argument determines."""
        elsewhere = {n for name, s in self.shapes.items() if name != argument for n in self.names_of(s)}
        return self.sizes.intersection(self.names_of(self.shapes.get(argument, ""))) - elsewhere

    def extents(self, items: Collection[Tensor | Weight], known: Iterable[str] = ()) -> list[Extent]:
        """The sizes that `items` determine, in the order in which they can be computed: plain names first, then names inside an
        expression. ValueError for an expression that cannot be solved."""
        known = {*known, *(self.static if self.planned else ())}
        if any(Shape(item.shape).leading for item in items):
            known.add(str(self.op.bucket))
        places = [(item, *place) for item in items for place in Shape(item.shape).places()]
        found = []
        for item, place, size in sorted(places, key=lambda entry: not is_name(entry[2])):
            unknown = self.sizes.intersection(names_in(size)) - known
            if len(unknown) == 1:
                known |= unknown
                (name,) = unknown
                found.append(Extent(name, item, f"shape_{item.name}[{place}]", *self._solve(size, name)))
        return found

    def _solve(self, text: str, name: str) -> tuple[str, ...]:
        """The operator and the operand that leave `name` of an expression that contains it."""
        tree = ast.parse(text, mode="eval").body
        if isinstance(tree, ast.Name):
            return ()
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult | ast.Add):
            sides = [ast.unparse(tree.left), ast.unparse(tree.right)]
            if sides.count(name) == 1:
                return " // " if isinstance(tree.op, ast.Mult) else " - ", sides[1 - sides.index(name)]
        raise ValueError(f"{self.op.name}: {name} cannot be determined from a size {text}")

    def resolve(self, text: str, arguments: Collection[str] = ()) -> str:
        """Source of an expression of sizes and arguments. arguments: names that are those of arguments, not of values."""
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in self.values.difference(arguments):
                node.id = f"s_{node.id}"
            elif isinstance(node, ast.Name) and node.id not in (*self.arguments, "min", "max"):
                raise ValueError(
                    f"{self.op.name}: {node.id} is neither a size of its arguments nor one of them"
                )
        return ast.unparse(tree)

    def computed(self, axis: str) -> str:
        """Source of the expression of a computed axis. Its names refer to sizes and arguments, not to axes."""
        return self.resolve(self.op.values[axis], {*self.arguments} - self.sizes)

    def axis_values(self) -> str:
        """Source of the axis values in `describe`. Dynamic axes that no argument determines are omitted."""
        given = {name: f"{name} is not None" if name in self.stated else name for name in self.arguments}
        values = {}
        for name, axis in self.axes.items():
            if name in self.values or axis.kind == "dtype" or any(w.scheme == name for w in self.weights):
                values[name] = f"s_{name}"
            elif axis.kind == "flags":
                flags = "".join(f"({flag!r}, {given[flag]}), " for flag in axis.choices)
                values[name] = f"'+'.join(name for name, on in ({flags}) if on) or 'none'"
            elif any(weight.act_order == name for weight in self.weights):
                values[name] = " or ".join(f"order_{weight.name}" for weight in self.weights)
            elif name in self.arguments:
                values[name] = given[name]
            elif not axis.dynamic:
                raise ValueError(f"{self.op.name}: no argument determines axis {name}")
        return f"{{{', '.join(f'{axis!r}: {value}' for axis, value in values.items())}}}"
