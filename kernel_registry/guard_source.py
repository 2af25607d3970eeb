"""The source of ``make_guard`` and ``like`` (see `argument_source`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gristmill.kernel_registry.argument_names import Names, Shape, is_name, names_in
from gristmill.kernel_registry.argument_source import (
    Checks,
    Lines,
    indented,
    scalar_bounds,
    tuple_of,
    weight_test,
)
from gristmill.kernel_registry.arguments import CONTIGUOUS, VECTORS, Declared, Tensor, Weight


class Guard:
    """The single condition that every valid planned call fulfils, and its parts."""

    def __init__(self, op: Declared) -> None:
        self.op, self.names = op, Names(op)
        self.setup: Lines = []  # statements run once, when the guard is created
        self.bindings: Lines = []  # statements of each call, before the condition
        self.failures: Lines = []  # the parts of the condition, each true for an invalid call
        self.known = {*self.names.static}
        self.constants: dict[str, str] = {}
        self.required = [t for t in self.names.tensors if not t.optional]
        self.optional = [t for t in self.names.tensors if t.optional]
        self.shaped: dict[str, str] = {}  # shape -> the first tensor that has it
        for item in (*self.required, *op.returns):
            self.shaped.setdefault(item.shape, item.name)
        self.lead = next((t for t in self.required if Shape(t.shape).leading), None)

    def constant(self, text: str) -> str:
        """The variable of an expression that the plan fixes, evaluated when the guard is created."""
        return self.constants.setdefault(text, f"h_{len(self.constants)}")

    def size(self, text: str) -> str:
        """Source of a size; a variable if the plan fixes it."""
        resolved = self.names.resolve(text, planned=True)
        fixed = all(name in self.names.static for name in names_in(text))
        return self.constant(resolved) if fixed and not is_name(text) and not text.isdigit() else resolved

    def shape(self, item: Tensor) -> str:
        """The condition under which the shape is invalid."""
        shape, first = Shape(item.shape), self.shaped.get(item.shape, item.name)
        if shape.flat:
            return f"{item.name}.numel() != {self.size(item.shape)}"
        if first != item.name:
            return f"{item.name}.shape != shape_{first}"
        if item is self.lead:
            return " or ".join(f"shape_{item.name}[{i}] != {self.size(size)}" for i, size in shape.places())
        sizes = [self.size(size) for size in shape.sizes]
        if shape.leading and self.lead is not None:
            cut = len(Shape(self.lead.shape).sizes)
            return f"{item.name}.shape != {tuple_of([f'*shape_{self.lead.name}[:-{cut}]', *sizes])}"
        expected = tuple_of(sizes)
        if all(name in self.names.static for name in self.names.names_of(item.shape)):
            expected = self.constant(tuple_of(self.names.resolve(s, planned=True) for s in shape.sizes))
        return f"{self.shape_of(item)} != {expected}"

    def shape_of(self, item: Tensor) -> str:
        """Source of the shape; a variable if it is used more than once."""
        same_shape = [t for t in (*self.names.tensors, *self.op.returns) if t.shape == item.shape]
        determines_size = any(name not in self.names.static for name in self.names.names_of(item.shape))
        is_bound = self.shaped.get(item.shape) == item.name and (
            len(same_shape) > 1 or determines_size or item is self.lead
        )
        return f"shape_{item.name}" if is_bound else f"{item.name}.shape"

    def strides(self, item: Tensor) -> str:
        """The condition under which the strides are invalid."""
        x, is_written = item.name, item.mutable or item in self.op.returns
        if item.strides == CONTIGUOUS:
            return f"not {x}.is_contiguous()"
        if item.strides == VECTORS and not is_written:
            return f"{x}.stride(-1) != 1 and not vectors({x})"
        test = f"{item.strides}({x}) and apart({x})" if is_written else f"{item.strides}({x})"
        return f"not ({x}.is_contiguous() or {self.nested(item)}{test})"

    def nested(self, item: Tensor) -> str:
        """A fast test for the usual strided view of an output: the stride of each dimension is at least the span of those after it."""
        shape = Shape(item.shape)
        if item.strides != VECTORS or shape.leading or not (item.mutable or item in self.op.returns):
            return ""
        strides, last = f"t_{item.name}", len(shape.sizes) - 1
        tests, span = [f"({strides} := {item.name}.stride())[{last}] == 1"], self.size(shape.sizes[last])
        for place in reversed(range(last)):
            tests.append(f"{strides}[{place}] >= {span}")
            span = f"{strides}[{place}] * ({self.size(shape.sizes[place])} - 1) + {span}"
        return " and ".join(tests) + " or "

    def tensor(self, item: Tensor) -> str:
        """The condition under which a tensor is invalid."""
        parts = [self.shape(item), f"{item.name}.dtype is not d_{item.dtype}", self.strides(item)]
        parts = [f"({part})" if " and " in part and not part.startswith("not") else part for part in parts]
        failure = " or ".join(parts)
        if not item.optional:
            return failure
        absent = [n for n in self.names.names_of(item.shape) if n in self.names.only_in(item.name)]
        if item.name in self.names.stated:
            return f"({item.name} is not None) is not s_{item.name} or (s_{item.name} and ({failure}))"
        if absent and absent[0] in self.names.static:
            return f"(s_{absent[0]} != 0 if {item.name} is None else ({failure}))"
        return f"({item.name} is not None and ({failure}))"

    def bind(self) -> None:
        """Bind variables to the sizes that change from call to call."""
        for item in (*self.required, *self.op.returns):
            if self.shape_of(item) == f"shape_{item.name}":
                self.bindings.append(f"shape_{item.name} = {item.name}.shape")
        for plain in (True, False):
            for item in (*self.required, *self.optional):
                for place, size in Shape(item.shape).places():
                    unknown = [n for n in self.names.sizes_in(size) if n not in self.known]
                    if len(unknown) != 1 or is_name(size) != plain:
                        continue
                    name = unknown[0]
                    extent = f"{self.shape_of(item)}[{place}]"
                    if not plain:
                        factor, offset = self.names.solve(size, name, planned=True)
                        extent = f"{extent} // {factor}" if factor else f"{extent} - {offset}"
                    elif item.optional:
                        extent = f"0 if {item.name} is None else {extent}"
                    self.bindings.append(f"s_{name} = {extent}")
                    self.known.add(name)
        for weight in self.names.weights:
            self.bindings.append(f"first_{weight.name} = {weight.name}[0]")

    def condition(self) -> None:
        """Collect the parts of the condition: tensors, axes that are arguments or computed, weights, rules."""
        self.failures += [self.tensor(item) for item in (*self.required, *self.op.returns, *self.optional)]
        self.failures += [f"{name} != s_{name}" for name in self.names.scalar_axes]
        for axis in self.op.values:
            computed = self.names.computed(axis)
            if axis in self.names.static:
                self.failures.append(f"({computed}) != s_{axis}")
            else:
                self.bindings.append(f"s_{axis} = {computed}")
        for scalar in self.names.scalars:
            if scalar.states:
                self.failures.append(f"({scalar.name} != s_{scalar.states} and {scalar.name} != 0)")
        for weight in self.names.weights:
            sizes = ", ".join(self.names.resolve(size, planned=True) for size in weight.shape.split())
            self.setup.append(f"bytes_{weight.name} = code_bytes(s_{weight.scheme}, {sizes})")
            self.failures.append(weight_test(weight, f"first_{weight.name}", self.names.tensors[0].name))
        for index, rule in enumerate(self.op.rules):
            if self.names.changes(rule):
                self.failures.append(f"rule_{index}({self.names.call(rule, planned=True)}) is not None")

    def bucket_size(self, fast: bool) -> str:
        """Source of the call's size on the bucket axis; at least 1 if an output has elements at size 0 too."""
        bucket = self.op.bucket
        if bucket is None:
            return "1"
        size = f"s_{bucket}"
        if fast and self.lead is not None:
            size = f"{self.lead.name}.numel() // {self.size('*'.join(Shape(self.lead.shape).sizes))}"
        outputs = [Shape(item.shape) for item in self.op.returns]
        if all(shape.leading or bucket in self.names.names_of(shape.text) for shape in outputs):
            return size
        return f"max(1, {size})"

    def lines(self) -> Lines:
        """``make_guard(problem)`` -> ``guard(call)``."""
        self.bind()
        self.condition()
        names = [*self.names.arguments, *(item.name for item in self.op.returns)]
        head = [f'where = f"{self.op.name} planned for {{problem}}"', "values = dict(problem.values)"]
        for axis in self.op.axes:
            if axis.kind == "dtype":
                same, value = self.names.dtype_of(axis.name), f"values[{axis.name!r}]"
                own = f"dtypes_{axis.name}[{value}]"
                head.append(f"s_{axis.name} = {value}")
                head.append(
                    f"d_{axis.name} = " + (f"d_{same} if {value} == {same!r} else {own}" if same else own)
                )
            elif axis.kind == "flags":
                head += [f"s_{flag} = {flag!r} in problem.flags({axis.name!r})" for flag in axis.choices]
            elif not axis.dynamic:
                head.append(f"s_{axis.name} = values[{axis.name!r}]")
        result = self.bucket_size(fast=True)
        head += [*self.setup, *(f"{name} = {text}" for text, name in self.constants.items()), ""]
        slow = [*Checks(self.op, planned=True).lines(), f"return {self.bucket_size(fast=False)}"]
        joined = [part if index == 0 else f"or {part}" for index, part in enumerate(self.failures)]
        condition = [
            *self.bindings,
            "if (",
            *indented(joined),
            "):",
            "    return examine(call)",
            f"return {result}",
        ]
        fast = [*_attributes(names, condition), *condition]
        body = [
            *head,
            "def examine(call):",
            *indented([*_attributes(names, slow), *slow]),
            "",
            "def guard(call):",
            *indented(fast),
            "",
            "return guard",
        ]
        return ["def make_guard(problem):", *indented(body)]


def _attributes(names: Iterable[str], lines: Lines) -> Lines:
    """Assignments of the attributes of the call that `lines` read."""
    read = {name for line in lines for name in re.findall(r"\w+", line)}
    return [f"{name} = call.{name}" for name in names if name in read]


def guard_source(op: Declared) -> Lines:
    """``make_guard(problem)`` -> ``guard(call)`` -> the call's size on the bucket axis."""
    return Guard(op).lines()


def like_source(op: Declared) -> Lines:
    """``like(*arguments)`` -> ((shape, dtype), ...) of the outputs, from the arguments that determine them.

    Runs under fake tensors, whose sizes are symbols: no size is compared with another argument's.
    """
    names, required = Names(op), [t for t in Names(op).tensors if not t.optional]
    same = {t.shape: t.name for t in reversed(required) if " " in t.shape}
    lead = next((t for t in required if Shape(t.shape).leading), None)
    needed = [name for item in op.returns if item.shape not in same for name in names.names_of(item.shape)]
    for name in needed:
        needed += [n for n in names_in(op.values.get(name, "0")) if n not in needed]
    scalars = [s for s in names.scalars if s.name in needed and not s.states]
    for scalar in scalars:
        needed += [n for n in names_in(str(scalar.maximum)) if n in names.sizes]
    needed = [name for name in dict.fromkeys(needed) if name in names.sizes]
    checks, lines = Checks(op, planned=False), Lines()
    sizes_declared = [size for item in checks.items for _, size in Shape(item.shape).places()]
    for name in needed:  # of a size that only an expression determines, what else is in the expression
        if name not in sizes_declared:
            first = next((size for size in sizes_declared if name in names.sizes_in(size)), "0")
            needed += [n for n in names.sizes_in(first) if n not in needed]

    for scalar in names.scalars:
        for weight in names.weights:
            if scalar.states in needed and scalar.states in weight.shape.split():
                arguments = f"where, {weight.name!r}, {weight.shape!r}, {weight.name}, {scalar.name}"
                lines.append(f"s_{scalar.states} = stated_size({arguments})")
                checks.known.add(scalar.states)
    items: list[Tensor | Weight] = []
    for plain in (True, False):
        for name in (n for n in needed if n not in checks.known):
            sources = [
                item
                for item in checks.items
                if any(
                    is_name(s) == plain and name in names.sizes_in(s) for _, s in Shape(item.shape).places()
                )
            ]
            if sources and sources[0] not in items:
                items.append(sources[0])
            checks.known |= {name} if sources else set()
    checks.known -= set(needed) - {s.states for s in names.scalars}
    checks.items = items
    leading = [item for item in op.returns if Shape(item.shape).leading and item.shape not in same]
    if lead is not None and leading and lead not in items:
        checks.items = [lead, *items]
    lines += [*checks.dims(), *checks.sizes()]
    checks.determined_by = {
        name: argument for name, argument in checks.determined_by.items() if name in checks.offset
    }
    lines += checks.minimums()
    for scalar in scalars:
        lines += scalar_bounds(names, scalar, ("bounds",))
    lines += [
        f"s_{name} = {names.computed(name)}"
        for name in op.values
        if any(name in names.names_of(r.shape) for r in op.returns)
    ]
    outputs = []
    for item in op.returns:
        if item.shape in same:
            shape = f"{same[item.shape]}.shape"
        else:
            sizes = [names.resolve(size, planned=False) for size in Shape(item.shape).sizes]
            shape = tuple_of([*(["*lead"] if Shape(item.shape).leading else []), *sizes])
        dtype_source = next(
            (t.name for t in names.tensors if t.dtype == item.dtype and item.dtype in names.axes), ""
        )
        outputs.append(f"({shape}, {f'{dtype_source}.dtype' if dtype_source else f'd_{item.dtype}'})")
    return [f"def like({names.parameters}):", *indented([*lines, f"return {tuple_of(outputs)}"])]
