"""`describe`, `like` and `guard` of an operation, written as Python source from its declared arguments and compiled once.

Source, not a walk over the declarations, because a guard runs at every planned call: values that the plan fixes are computed when
the guard is created, and the rest is one condition. If that condition does not hold, `examine` checks the call again, argument by
argument. It raises the error that names the fault, or accepts the call if its strides are unusual but supported.

In the source ``s_<name>`` is a size or another axis value, ``d_<name>`` a torch dtype, ``h_<number>`` a constant of the plan.
``inspect.getsource`` and tracebacks show it; ``print(op.source)`` too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from gristmill.kernel_registry.argument_names import Names, Shape, is_name, names_in
from gristmill.kernel_registry.arguments import CONTIGUOUS, Declared, Scalar, Tensor, Weight
from gristmill.kernel_registry.problem import Axis

Lines = list[str]
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
}
"""Negations of the comparisons for which NaN is no special case."""


def indented(lines: Iterable[str]) -> Lines:
    """`lines` one block deeper."""
    return [f"    {line}" if line else "" for line in lines]


def unless(condition: str, error: str) -> Lines:
    """Raise `error` unless `condition`."""
    test = ast.parse(condition, mode="eval").body
    if isinstance(test, ast.Compare) and type(test.ops[0]) in OPPOSITE:
        test.ops = [OPPOSITE[type(test.ops[0])]()]
    else:
        test = ast.UnaryOp(ast.Not(), test)
    return [f"if {ast.unparse(test)}:", f"    raise {error}"]


def tuple_of(items: Iterable[str]) -> str:
    """A tuple display."""
    texts = list(items)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


class Checks:
    """The checks of one call, argument by argument. `describe` derives all axes; a plan has fixed the static ones."""

    def __init__(self, op: Declared, planned: bool) -> None:
        self.op, self.names, self.planned = op, Names(op), planned
        tensors = self.names.tensors
        self.first = tensors[0].name
        self.items: list[Tensor | Weight] = [*tensors]
        self.items += op.returns if planned else self.names.weights
        self.items.sort(key=lambda item: isinstance(item, Tensor) and item.optional)
        self.known: set[str] = {*self.names.static} if planned else set()
        self.determined_by: dict[str, str] = {}  # size -> the argument that determines it
        self.divisible: dict[
            str, str
        ] = {}  # size divided out of an expression -> the condition that the division is exact
        self.offset: dict[str, str] = {}  # size with an offset in its expression -> the offset, for messages
        self.lead = ""

    def expression(self, text: str) -> str:
        """Source of a size expression."""
        return self.names.resolve(text, self.planned)

    def guarded(self, item: Tensor | Weight, lines: Lines) -> Lines:
        """`lines`, under a test for None if the argument is optional."""
        if isinstance(item, Tensor) and item.optional and lines:
            return [f"if {item.name} is not None:", *indented(lines)]
        return lines

    def tensor(self, item: Tensor | Weight) -> str:
        """The variable that holds a tensor or a described weight."""
        return item.name if isinstance(item, Tensor) else f"w_{item.name}"

    def dims(self) -> Lines:
        """Checks of the types of the arguments and of their numbers of dimensions."""
        needed = [t.name for t in self.items if isinstance(t, Tensor) and not t.optional]
        lines = [f"need_tensors(where, {', '.join(f'{name}={name}' for name in needed)})"] if needed else []
        for item in self.items:
            shape = Shape(item.shape)
            if isinstance(item, Weight):
                targets = f"w_{item.name}, scheme_{item.name}, order_{item.name}"
                lines.append(
                    f"{targets} = dense_or_quantized(where, {item.name!r}, {item.shape!r}, {item.name})"
                )
            elif not shape.flat:
                test = f"{item.name}.dim() {'>=' if shape.leading else '=='} {len(shape.sizes)}"
                legend = self.names.legend(item.shape)
                error = f"wrong_dims(where, {item.name!r}, {item.shape!r}, {item.name}, {legend!r})"
                lines += self.guarded(item, unless(test, error))
        return lines

    def sizes(self) -> Lines:
        """Assignments of the sizes that shapes determine: plain names first, then names inside an expression."""
        lines: Lines = []
        for plain in (True, False):
            for item in self.items:
                shape = Shape(item.shape)
                if shape.leading and not self.lead:
                    self.lead = item.name
                    lines.append(f"lead = {item.name}.shape[:{-len(shape.sizes)}]")
                    lines.append(f"s_{self.op.bucket} = prod(lead)")
                    self.known.add(str(self.op.bucket))
                for place, size in shape.places():
                    if is_name(size) == plain:
                        lines += self.size(item, place, size)
        return lines

    def size(self, item: Tensor | Weight, place: int, size: str) -> Lines:
        unknown = [n for n in self.names.sizes_in(size) if n not in self.known]
        if len(unknown) != 1:
            return []
        name, extent = unknown[0], f"{self.tensor(item)}.shape[{place}]"
        self.known.add(name)
        self.determined_by[name] = item.name
        optional = isinstance(item, Tensor) and item.optional
        if size == name:
            return [
                f"s_{name} = 0 if {item.name} is None else {extent}" if optional else f"s_{name} = {extent}"
            ]
        factor, offset = self.names.solve(size, name, self.planned)
        if factor:
            self.divisible[name] = f"{extent} == {self.expression(size)}"
            return [f"s_{name} = {extent} // {factor}"]
        text = offset.replace("s_", "")
        self.offset[name] = "" if offset.isdigit() else f" where {text} is {{{offset}}}"
        return [f"s_{name} = {extent} - {offset}"]

    def minimums(self) -> Lines:
        """Checks of sizes against the minimum of their axis."""
        lines: Lines = []
        for name, argument in self.determined_by.items():
            axis, item = self.names.axes.get(name), next(i for i in self.items if i.name == argument)
            head = f"where, {argument!r}, {item.shape!r}"
            if name in self.divisible:
                error = f"wrong_size({head}, '{name} a whole number', {self.tensor(item)})"
                lines += unless(self.divisible[name], error)
            optional = isinstance(item, Tensor) and item.optional
            if axis is not None and not optional and (axis.minimum or name in self.offset):
                why = f"{'f' if self.offset.get(name) else ''}'{name} at least {axis.minimum}{self.offset.get(name, '')}'"
                error = f"wrong_size({head}, {why}, {self.tensor(item)})"
                lines += unless(f"s_{name} >= {axis.minimum}", error)
        return lines

    def values(self) -> Lines:
        """Assignments of computed axes, and checks of arguments that are axes."""
        lines: Lines = []
        for name, text in self.op.values.items():
            computed = self.names.computed(name)
            if self.planned and name in self.names.static:
                argument = next(n for n in names_in(text) if n in self.names.arguments)
                lines += unless(
                    f"({computed}) == s_{name}",
                    f"wrong_value(where, {argument!r}, f'such that {name} is {{s_{name}!r}}', {argument})",
                )
            else:
                lines.append(f"s_{name} = {computed}")
        if self.planned:
            for name in self.names.stated:
                lines += unless(
                    f"({name} is not None) is s_{name}",
                    f"wrong_value(where, {name!r}, 'given' if s_{name} else 'None', {name})",
                )
            for name in self.names.scalar_axes:
                lines += unless(
                    f"{name} == s_{name}", f"wrong_value(where, {name!r}, repr(s_{name}), {name})"
                )
        return lines

    def shapes(self) -> Lines:
        """Checks of sizes that more than one argument determines."""
        lines: Lines = []
        for item in self.items:
            shape, x = Shape(item.shape), self.tensor(item)
            sizes = [self.expression(size) for size in shape.sizes]
            if shape.flat:
                test, expected = f"{x}.numel() == {sizes[0]}", f"({sizes[0]},)"
            elif all(self.determined_by.get(size) == item.name for size in shape.sizes) and (
                not shape.leading or self.lead == item.name
            ):
                continue
            else:
                expected = tuple_of([*(["*lead"] if shape.leading else []), *sizes])
                test = f"tuple({x}.shape) == {expected}"
            owners = {
                name: self.determined_by[name]
                for name in self.names.names_of(item.shape)
                if name in self.determined_by
            }
            origins = "".join(
                f", {name} as in {owner}" for name, owner in owners.items() if owner != item.name
            )
            error = f"wrong_shape(where, {item.name!r}, {item.shape!r}, {expected}, {x}, {origins!r})"
            absent = [n for n in shape.sizes if n in self.names.static and n in self.names.only_in(item.name)]
            if self.planned and absent and isinstance(item, Tensor) and item.optional:
                lines += unless(
                    f"{x} is not None or s_{absent[0]} == 0", f"wrong_value(where, {x!r}, 'given', {x})"
                )
            lines += self.guarded(item, unless(test, error))
        return lines

    def kinds(self) -> Lines:
        """Checks of dtypes, devices and strides."""
        lines: Lines = []
        first_of: dict[str, str] = {}
        for item in self.items:
            x = self.tensor(item)
            if isinstance(item, Weight):
                lines += self.scheme(item, first_of)
                continue
            checks: Lines = []
            axis = self.names.axes.get(item.dtype)
            first = first_of.setdefault(item.dtype, x)
            if self.planned:
                error = f"unplanned_dtype(where, {x!r}, d_{item.dtype}, {x})"
                checks += unless(f"{x}.dtype is d_{item.dtype}", error)
            elif axis is None:
                checks += unless(
                    f"{x}.dtype is d_{item.dtype}", f"wrong_dtype(where, {x!r}, [d_{item.dtype}], {x})"
                )
            elif first == x and self.names.dtype_of(axis.name):
                checks += self.alternative(x, axis, first_of)
            elif first == x:
                checks.append(f"s_{axis.name} = names_{axis.name}.get({x}.dtype)")
                checks += unless(
                    f"s_{axis.name} is not None", f"wrong_dtype(where, {x!r}, names_{axis.name}, {x})"
                )
            else:
                error = f"other_dtype(where, {x!r}, {x}, {first!r}, {first}.dtype)"
                checks += unless(f"{x}.dtype is {first}.dtype", error)
            checks += self.device(x, x)
            test = (
                f"{x}.is_contiguous()" if item.strides == CONTIGUOUS else f"STRIDES_OF[{item.strides!r}]({x})"
            )
            checks += unless(test, f"wrong_strides(where, {x!r}, {item.strides!r}, {x})")
            if item.strides != CONTIGUOUS and (item.mutable or item in self.op.returns):
                checks += unless(f"apart({x})", f"overlapping(where, {x!r}, {x})")
            lines += self.guarded(item, checks)
        return lines

    def alternative(self, x: str, axis: Axis, first_of: dict[str, str]) -> Lines:
        """The dtype axis of a tensor that has either the dtype of another tensor or one of its own choices."""
        same = self.names.dtype_of(axis.name)
        first = first_of[same]
        own = f"names_{axis.name}"
        return [
            f"s_{axis.name} = {same!r} if {x}.dtype is {first}.dtype else {own}.get({x}.dtype)",
            *unless(
                f"s_{axis.name} is not None",
                f"other_dtype(where, {x!r}, {x}, {first!r}, {first}.dtype, {own})",
            ),
        ]

    def device(self, name: str, x: str) -> Lines:
        if x == self.first:
            return []
        error = f"wrong_device(where, {name!r}, {x}, {self.first!r}, {self.first}.device)"
        return unless(f"{x}.device == {self.first}.device", error)

    def scheme(self, item: Weight, first_of: dict[str, str]) -> Lines:
        lines = self.device(item.name, f"w_{item.name}")
        if item.scheme in first_of:
            expected = f'f"of {first_of[item.scheme]}\'s scheme {{s_{item.scheme}}}"'
            error = f"wrong_value(where, {item.name!r}, {expected}, scheme_{item.name})"
            return [*lines, *unless(f"scheme_{item.name} == s_{item.scheme}", error)]
        first_of[item.scheme] = item.name
        return [*lines, f"s_{item.scheme} = scheme_{item.name}"]

    def scalars(self) -> Lines:
        """Checks of scalars and, with a plan, of packed weights."""
        lines: Lines = []
        for scalar in self.names.scalars:
            lines += scalar_bounds(self.names, scalar, () if self.planned else ("bounds",))
        if self.planned:
            for weight in self.names.weights:
                x, least = weight.name, f"bytes_{weight.name}"
                error = f"wrong_weight(where, {x!r}, {x}, {least}, {self.first}.device)"
                lines += [f"if {weight_test(weight, x + '[0]', self.first)}:", f"    raise {error}"]
        return lines

    def rules(self) -> Lines:
        """Calls of the hand-written rules."""
        lines: Lines = []
        for index, rule in enumerate(self.op.rules):
            if self.planned and not self.names.changes(rule):
                continue
            lines.append(f"wrong = rule_{index}({self.names.call(rule, self.planned)})")
            lines += unless("wrong is None", "ValueError(f'{where}: {wrong}')")
        return lines

    def lines(self) -> Lines:
        """All checks. Each may rely on those before it."""
        return [
            *self.dims(),
            *self.sizes(),
            *([] if self.planned else self.minimums()),
            *self.values(),
            *self.shapes(),
            *self.kinds(),
            *self.scalars(),
            *self.rules(),
        ]


def scalar_bounds(names: Names, scalar: Scalar, checks: tuple[str, ...]) -> Lines:
    """The checks of a scalar: its declared bounds, and that it equals the size that it states."""
    name, lines = scalar.name, Lines()
    if scalar.states:
        size = f"s_{scalar.states}"
        error = f"wrong_value(where, {name!r}, f'0 or the {scalar.states} of the weight, {{{size}}}', {name})"
        lines += unless(f"{name} == 0 or {name} == {size}", error)
    if "bounds" not in checks:
        return lines
    axis = names.axes.get(name)
    minimum = scalar.minimum
    if minimum is None and scalar.kind == "int" and axis is not None and name in names.scalar_axes:
        minimum = axis.minimum
    if minimum is not None:
        error = f"wrong_value(where, {name!r}, 'at least {minimum:g}', {name})"
        lines += unless(f"{name} >= {minimum!r}", error)
    if scalar.maximum is not None:
        most = names.resolve(str(scalar.maximum), planned=False)
        expected = f"'at most {most}'" if most.isdigit() else f"f'at most {{{most}}} ({scalar.maximum})'"
        lines += unless(f"{name} <= {most}", f"wrong_value(where, {name!r}, {expected}, {name})")
    if scalar.finite:
        lines += unless(f"isfinite({name})", f"wrong_value(where, {name!r}, 'finite', {name})")
    if axis is not None and axis.choices and name in names.scalar_axes:
        expected = f"one of {', '.join(axis.choices)}"
        lines += unless(f"{name} in {axis.choices!r}", f"wrong_value(where, {name!r}, {expected!r}, {name})")
    return lines


def weight_test(weight: Weight, first: str, tensor: str) -> str:
    """The condition under which the first packed tensor is invalid."""
    tests = [
        f"{first}.nbytes < bytes_{weight.name}",
        f"{first}.device != {tensor}.device",
        f"not {first}.is_contiguous()",
    ]
    sizes = weight.shape.split()
    return " or ".join([*([f"{first}.shape[0] != s_{sizes[0]}"] if len(sizes) > 2 else []), *tests])


def describe_source(op: Declared) -> Lines:
    """``describe(*arguments)`` -> axis values."""
    names = Names(op)
    body = Checks(op, planned=False).lines()
    values = [f"{axis!r}: {value}" for axis, value in names.axis_values().items()]
    return [
        f"def describe({names.parameters}):",
        *indented([*body, "return {", *indented(f"{v}," for v in values), "}"]),
    ]
