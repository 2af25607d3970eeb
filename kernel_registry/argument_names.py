"""Meaning of the names in the declared shapes, rules and computed axes of an operation.

Expressions are kept as Python source. In it an argument has its own name, and ``s_<name>`` is a size or another axis value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import signature

from gristmill.kernel_registry.arguments import Declared, Scalar, Tensor, Weight
from gristmill.kernel_registry.dtypes import TORCH_NAMES


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

    flat: only the number of elements is declared. leading: any leading dimensions are allowed before `sizes`, which are the
    size of each dimension, or the number of elements.
    """

    def __init__(self, text: str) -> None:
        self.flat, self.leading = text.startswith("("), text.startswith("...")
        self.sizes = (text,) if self.flat else tuple(text.removeprefix("...").split())

    def places(self) -> Iterator[tuple[int, str]]:
        """(index, size) of each dimension, the index counted from the end after leading dimensions. Empty for a flat shape."""
        if not self.flat:
            back = len(self.sizes) if self.leading else 0
            yield from ((place - back, size) for place, size in enumerate(self.sizes))


@dataclass(frozen=True)
class Extent:
    """Where a call has a size: a dimension of an argument, or what is left of it after an operation such as ``// 2``.

    operator: that leaves `name` of the declared `size`, ``//`` or ``-``, with the source of its `operand`; "" for a plain name.
    """

    name: str
    item: Tensor | Weight
    place: int
    size: str
    operator: str = ""
    operand: str = ""

    def source(self, shape: str) -> str:
        """Source of the size, from that of the argument's shape."""
        extent = f"{shape}[{self.place}] {self.operator} {self.operand}".rstrip()
        return f"0 if {self.item.name} is None else {extent}" if self.item.optional else extent


class Names:
    """The names of one operation.

    planned: the axes that a plan fixes are known. sizes: determined by shapes. static: axes that a plan fixes, and the arguments
    that its flags fix. stated: optional tensors whose presence a plan fixes. scalar_axes: scalars that are static axes.
    """

    def __init__(self, op: Declared, planned: bool = False) -> None:
        self.op, self.planned = op, planned
        self.axes = {axis.name: axis for axis in op.axes}
        self.tensors = [a for a in op.arguments if isinstance(a, Tensor)]
        self.weights = [a for a in op.arguments if isinstance(a, Weight)]
        self.scalars = [a for a in op.arguments if isinstance(a, Scalar)]
        self.arguments: tuple[str, ...] = tuple(a.name for a in op.arguments)
        plain = [scalar.name for scalar in self.scalars if not scalar.states]
        declared: list[Tensor | Weight] = [*self.tensors, *self.weights]
        self.shapes = {item.name: item.shape for item in declared}
        self.sizes = {name for shape in self.shapes.values() for name in self.names_of(shape)} - {*plain}
        if any(Shape(shape).leading for shape in self.shapes.values()) and op.bucket is not None:
            self.sizes.add(op.bucket)
        flags = {flag for axis in op.axes if axis.kind == "flags" for flag in axis.choices}
        self.static = {axis.name for axis in op.axes if not axis.dynamic} | flags
        self.stated = [
            t.name for t in self.tensors if t.optional and (t.name in flags or self._kind(t.name) == "bool")
        ]
        self.scalar_axes = [n for n in plain if n in self.static and n not in {*self.sizes, *op.values}]

    def dtype_of(self, axis: str) -> str:
        """The dtype axis that a dtype axis may refer to; "" if all its choices are dtypes."""
        choices = self.axes[axis].choices if axis in self.axes else ()
        return next((choice for choice in choices if self._kind(choice) == "dtype"), "")

    def _kind(self, name: str) -> str:
        return self.axes[name].kind if name in self.axes else ""

    def dtypes(self, axis: str) -> list[str]:
        """The choices of a dtype axis that are dtypes."""
        return [name for name in self.axes[axis].choices or TORCH_NAMES if name in TORCH_NAMES]

    def names_of(self, shape: str) -> list[str]:
        """The names in a shape."""
        return list(dict.fromkeys(name for size in Shape(shape).sizes for name in names_in(size)))

    def only_in(self, argument: str) -> set[str]:
        """Sizes that only this argument determines."""
        elsewhere = {n for name, s in self.shapes.items() if name != argument for n in self.names_of(s)}
        return self.sizes.intersection(self.names_of(self.shapes.get(argument, ""))) - elsewhere

    def extents(self, items: Iterable[Tensor | Weight], known: Iterable[str] = ()) -> list[Extent]:
        """The sizes that `items` determine, in the order in which they can be computed: plain names first, then names inside an
        expression. ValueError for an expression that cannot be solved."""
        known = {*known, *self.static} if self.planned else {*known}
        if any(Shape(item.shape).leading for item in items):
            known.add(str(self.op.bucket))
        places = [(item, *place) for item in items for place in Shape(item.shape).places()]
        found = []
        for item, place, size in sorted(places, key=lambda entry: not is_name(entry[2])):
            unknown = [name for name in names_in(size) if name in self.sizes - known]
            if len(unknown) == 1:
                known.add(unknown[0])
                found.append(Extent(unknown[0], item, place, size, *self._solve(size, unknown[0])))
        return found

    def _solve(self, text: str, name: str) -> tuple[str, ...]:
        """The operator and the operand that leave `name` of an expression that contains it."""
        tree = ast.parse(text, mode="eval").body
        if isinstance(tree, ast.Name):
            return ()
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult | ast.Add):
            sides = [ast.unparse(tree.left), ast.unparse(tree.right)]
            if sides.count(name) == 1:
                operand = self.resolve(sides[1 - sides.index(name)])
                return "//" if isinstance(tree.op, ast.Mult) else "-", operand
        raise ValueError(f"{self.op.name}: {name} cannot be determined from a size {text}")

    def variable(self, name: str) -> str:
        """The variable with the value of a name: ``s_<name>`` for sizes and for what a plan fixes, else the argument."""
        is_dtype = self._kind(name) == "dtype" and name not in self.arguments
        if name in self.sizes or name in self.op.values or is_dtype or (self.planned and name in self.static):
            return f"s_{name}"
        if name in self.arguments:
            return name
        raise ValueError(f"{self.op.name}: {name} is neither a size of its arguments nor one of them")

    def resolve(self, text: str) -> str:
        """Source of an expression of sizes."""
        return self._replaced(text, self.variable)

    def computed(self, axis: str) -> str:
        """Source of the expression of a computed axis. Its names refer to sizes and arguments, not to axes."""
        own = {*self.arguments} - self.sizes
        return self._replaced(self.op.values[axis], lambda n: n if n in own else self.variable(n))

    def _replaced(self, text: str, variable: Callable[[str], str]) -> str:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in ("min", "max"):
                node.id = variable(node.id)
        return ast.unparse(tree)

    def rules(self) -> list[str]:
        """Source of the calls of rules; with a plan, of those with a parameter that it does not fix."""
        calls = []
        for index, rule in enumerate(self.op.rules):
            parameters = signature(rule).parameters
            if not (self.planned and self.static.issuperset(parameters)):
                calls.append(f"rule_{index}({', '.join(map(self.variable, parameters))})")
        return calls

    def axis_values(self) -> str:
        """Source of the axis values in `describe`. Dynamic axes that no argument determines are omitted."""
        values, schemes = {}, {weight.scheme for weight in self.weights}
        for name, axis in self.axes.items():
            if name in {*self.sizes, *self.op.values, *schemes} or axis.kind == "dtype":
                values[name] = f"s_{name}"
            elif axis.kind == "flags":
                flags = "".join(f"({flag!r}, {self._given(flag)}), " for flag in axis.choices)
                values[name] = f"'+'.join(name for name, on in ({flags}) if on) or 'none'"
            elif any(weight.act_order == name for weight in self.weights):
                values[name] = " or ".join(f"order_{w.name}" for w in self.weights)
            elif name in self.arguments:
                values[name] = self._given(name)
            elif not axis.dynamic:
                raise ValueError(f"{self.op.name}: no argument determines axis {name}")
        return f"{{{', '.join(f'{axis!r}: {value}' for axis, value in values.items())}}}"

    def _given(self, name: str) -> str:
        return f"{name} is not None" if name in self.stated else name
