"""Meaning of the names in the declared shapes, rules and computed axes of an operation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

from gristmill.kernel_registry.arguments import Declared, Scalar, Tensor, Weight


def names_in(text: str) -> list[str]:
    """The names in an expression."""
    nodes = ast.walk(ast.parse(text, mode="eval"))
    return list(
        dict.fromkeys(
            node.id for node in nodes if isinstance(node, ast.Name) and node.id not in ("min", "max")
        )
    )


def is_name(size: str) -> bool:
    """Whether a size is a plain name, not a number or an expression."""
    return size.isidentifier()


@dataclass(frozen=True)
class Shape:
    """A parsed shape declaration."""

    text: str

    @property
    def flat(self) -> bool:
        """Whether only the number of elements is declared."""
        return self.text.startswith("(")

    @property
    def leading(self) -> bool:
        """Whether any leading dimensions are allowed before `sizes`."""
        return self.text.startswith("...")

    @property
    def sizes(self) -> tuple[str, ...]:
        """The size of each dimension (of a flat shape: the number of elements), without the leading ones."""
        return (self.text,) if self.flat else tuple(size for size in self.text.split() if size != "...")

    def places(self) -> Iterator[tuple[int, str]]:
        """(index, size) of each dimension, the index counted from the end after leading dimensions. Empty for a flat shape."""
        if not self.flat:
            back = len(self.sizes) if self.leading else 0
            yield from ((place - back, size) for place, size in enumerate(self.sizes))


class Names:
    """The names of one operation.

    sizes: determined by shapes. static: axes that a plan fixes, and the arguments that its flags fix.
    stated: optional tensors whose presence a plan fixes. scalar_axes: scalars that are static axes (without a plan: all
    scalars that are axes).
    """

    def __init__(self, op: Declared) -> None:
        self.op = op
        self.axes = {axis.name: axis for axis in op.axes}
        self.tensors = [a for a in op.arguments if isinstance(a, Tensor)]
        self.weights = [a for a in op.arguments if isinstance(a, Weight)]
        self.scalars = [a for a in op.arguments if isinstance(a, Scalar)]
        self.arguments: tuple[str, ...] = tuple(a.name for a in op.arguments)
        self.parameters = ", ".join(
            p.name if p.default is None else f"{p.name}={p.default}" for p in op.parameters
        )
        plain = {scalar.name for scalar in self.scalars if not scalar.states}
        declared: list[Tensor | Weight] = [*self.tensors, *self.weights]
        self.shapes = {item.name: item.shape for item in declared}
        self.sizes = {name for shape in self.shapes.values() for name in self.names_of(shape)} - plain
        if any(Shape(shape).leading for shape in self.shapes.values()) and op.bucket is not None:
            self.sizes.add(op.bucket)
        flags = {flag for axis in op.axes if axis.kind == "flags" for flag in axis.choices}
        self.flags = {axis.name for axis in op.axes if axis.kind == "flags"}
        self.static = {axis.name for axis in op.axes if not axis.dynamic} | flags
        self.stated = [
            t.name for t in self.tensors if t.optional and (t.name in flags or self._kind(t.name) == "bool")
        ]
        self.scalar_axes = [
            name for name in plain if name in self.static and name not in self.sizes and name not in op.values
        ]
        self.scalar_axes.sort(key=self.arguments.index)

    def dtype_of(self, axis: str) -> str:
        """The dtype axis that a dtype axis may refer to; "" if all its choices are dtypes."""
        return next((choice for choice in self.axes[axis].choices if self._kind(choice) == "dtype"), "")

    def _kind(self, name: str) -> str:
        return self.axes[name].kind if name in self.axes else ""

    def names_of(self, shape: str) -> list[str]:
        """The names in a shape."""
        sizes = [size for size in Shape(shape).sizes if size != "..."]
        return list(dict.fromkeys(name for size in sizes for name in names_in(size)))

    def legend(self, shape: str) -> str:
        """The meaning of the sizes of a shape that are axes, for messages."""
        meanings = [f"{name}: {self.axes[name].help}" for name in self.names_of(shape) if name in self.axes]
        return f" ({'; '.join(meanings)})" if meanings else ""

    def sizes_in(self, text: str) -> list[str]:
        """The sizes in an expression."""
        return [name for name in names_in(text) if name in self.sizes]

    def only_in(self, argument: str) -> set[str]:
        """Sizes that only this argument determines."""
        sizes_elsewhere = {
            size for name, shape in self.shapes.items() if name != argument for size in self.names_of(shape)
        }
        return self.sizes.intersection(self.names_of(self.shapes.get(argument, ""))) - sizes_elsewhere

    def variable(self, name: str, planned: bool) -> str:
        """The variable with the value of a name: ``s_<name>`` for sizes and for what a plan fixes, else the argument."""
        is_value = name in self.sizes or name in self.op.values
        is_dtype = self._kind(name) == "dtype" and name not in self.arguments
        if is_value or is_dtype or (planned and name in self.static):
            return f"s_{name}"
        if name in self.arguments:
            return name
        raise ValueError(f"{self.op.name}: {name} is neither a size of its arguments nor one of them")

    def resolve(self, text: str, planned: bool) -> str:
        """Source of an expression of sizes."""
        return self._replaced(text, lambda name: self.variable(name, planned))

    def computed(self, axis: str) -> str:
        """Source of the expression of a computed axis. Its names refer to sizes and arguments, not to axes."""
        return self._replaced(
            self.op.values[axis],
            lambda name: (
                name if name in self.arguments and name not in self.sizes else self.variable(name, False)
            ),
        )

    def _replaced(self, text: str, variable: Callable[[str], str]) -> str:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in ("min", "max"):
                node.id = variable(node.id)
        return ast.unparse(tree)

    def solve(self, text: str, name: str, planned: bool) -> tuple[str, str]:
        """(factor, "") of ``2*name`` or ("", offset) of ``name+2``; ValueError for an expression of another form."""
        tree = ast.parse(text, mode="eval").body
        if isinstance(tree, ast.BinOp):
            sides = [ast.unparse(tree.left), ast.unparse(tree.right)]
            if sides.count(name) == 1:
                operand = self.resolve(sides[1 - sides.index(name)], planned)
                if isinstance(tree.op, ast.Mult):
                    return operand, ""
                if isinstance(tree.op, ast.Add):
                    return "", operand
        raise ValueError(f"{self.op.name}: {name} cannot be determined from a size {text}")

    def call(self, rule: Callable[..., Any], planned: bool) -> str:
        """Source of the arguments of a rule, which are the names of its parameters."""
        return ", ".join(self.variable(name, planned) for name in signature(rule).parameters)

    def changes(self, rule: Callable[..., Any]) -> bool:
        """Whether a rule has a parameter that a plan does not fix."""
        return any(name not in self.static for name in signature(rule).parameters)

    def axis_values(self) -> dict[str, str]:
        """Axis -> the expression of its value in `describe`. Dynamic axes that no argument determines are omitted."""
        values = {}
        for axis in self.op.axes:
            if axis.name in self.sizes or axis.name in self.op.values or axis.kind == "dtype":
                values[axis.name] = f"s_{axis.name}"
            elif axis.kind == "flags":
                values[axis.name] = " ".join(
                    ["'+'.join(name for name, on in (", *map(self._flag, axis.choices), ") if on) or 'none'"]
                )
            elif any(weight.scheme == axis.name for weight in self.weights):
                values[axis.name] = f"s_{axis.name}"
            elif any(weight.act_order == axis.name for weight in self.weights):
                values[axis.name] = " or ".join(f"order_{w.name}" for w in self.weights)
            elif axis.name in self.stated:
                values[axis.name] = f"{axis.name} is not None"
            elif axis.name in self.arguments:
                values[axis.name] = axis.name
            elif not axis.dynamic:
                raise ValueError(f"{self.op.name}: no argument determines axis {axis.name}")
        return values

    def _flag(self, name: str) -> str:
        condition = f"{name} is not None" if name in self.stated else name
        return f"({name!r}, {condition}),"
