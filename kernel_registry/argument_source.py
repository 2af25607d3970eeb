"""`describe`, `like` and `guard` of an operation, written as Python source from its declared arguments and compiled once.

Source, not a walk over the declarations, because a guard runs at every planned call: what the plan fixes is computed when the
guard is made, and the rest is one condition. Where that condition does not hold, `examine` looks at the call again, argument by
argument: it raises the error that names what is wrong, or finds strides that are unusual and still taken.

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
"""Of comparisons that a NaN does not make false both ways."""


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
    """The checks of one call, argument by argument: of `describe`, which learns the axes, or of a plan, which knows the static ones."""

    def __init__(self, op: Declared, planned: bool) -> None:
        self.op, self.names, self.planned = op, Names(op), planned
        tensors = self.names.tensors
        self.first = tensors[0].name
        self.items: list[Tensor | Weight] = [*tensors]
        self.items += op.returns if planned else self.names.weights
        self.items.sort(key=lambda item: isinstance(item, Tensor) and item.optional)
        self.known: set[str] = {*self.names.static} if planned else set()
        self.told: dict[str, str] = {}  # size -> the argument that determines it
        self.whole: dict[str, str] = {}  # size that an expression divides -> the condition that it does
        self.offset: dict[
            str, str
        ] = {}  # size that an expression subtracts from -> what is subtracted, for people
        self.lead = ""

    def expression(self, text: str) -> str:
        """A size expression as source."""
        return self.names.resolve(text, self.planned)

    def guarded(self, item: Tensor | Weight, lines: Lines) -> Lines:
        """`lines`, run only where an optional argument is given."""
        if isinstance(item, Tensor) and item.optional and lines:
            return [f"if {item.name} is not None:", *indented(lines)]
        return lines

    def tensor(self, item: Tensor | Weight) -> str:
        """The variable that holds a tensor or a described weight."""
        return item.name if isinstance(item, Tensor) else f"w_{item.name}"

    def dims(self) -> Lines:
        """That tensors came, their numbers of dimensions, and what kind of weights came."""
        needed = [t.name for t in self.items if isinstance(t, Tensor) and not t.optional]
        lines = [f"need_tensors(where, {', '.join(f'{name}={name}' for name in needed)})"] if needed else []
        for item in self.items:
            shape = Shape(item.shape)
            if isinstance(item, Weight):
                made = f"w_{item.name}, scheme_{item.name}, order_{item.name}"
                lines.append(
                    f"{made} = dense_or_quantized(where, {item.name!r}, {item.shape!r}, {item.name})"
                )
            elif not shape.flat:
                test = f"{item.name}.dim() {'>=' if shape.leading else '=='} {len(shape.sizes)}"
                legend = self.names.legend(item.shape)
                error = f"wrong_dims(where, {item.name!r}, {item.shape!r}, {item.name}, {legend!r})"
                lines += self.guarded(item, unless(test, error))
        return lines

    def sizes(self) -> Lines:
        """Every size that a shape determines: plain names first, then those inside an expression."""
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
        name, here = unknown[0], f"{self.tensor(item)}.shape[{place}]"
        self.known.add(name)
        self.told[name] = item.name
        optional = isinstance(item, Tensor) and item.optional
        if size == name:
            return [f"s_{name} = 0 if {item.name} is None else {here}" if optional else f"s_{name} = {here}"]
        factor, offset = self.names.solve(size, name, self.planned)
        if factor:
            self.whole[name] = f"{here} == {self.expression(size)}"
            return [f"s_{name} = {here} // {factor}"]
        self.offset[name] = "" if offset.isdigit() else f" where {offset} is {{{offset}}}"
        return [f"s_{name} = {here} - {offset}"]

    def minimums(self) -> Lines:
        """Sizes that an axis does not take."""
        lines: Lines = []
        for name, teller in self.told.items():
            axis, item = self.names.axes.get(name), next(i for i in self.items if i.name == teller)
            head = f"where, {teller!r}, {item.shape!r}"
            if name in self.whole:
                error = f"wrong_size({head}, '{name} a whole number', {self.tensor(item)})"
                lines += unless(self.whole[name], error)
            optional = isinstance(item, Tensor) and item.optional
            if axis is not None and not optional and (axis.minimum or name in self.offset):
                why = f"{'f' if self.offset.get(name) else ''}'{name} at least {axis.minimum}{self.offset.get(name, '')}'"
                error = f"wrong_size({head}, {why}, {self.tensor(item)})"
                lines += unless(f"s_{name} >= {axis.minimum}", error)
        return lines

    def values(self) -> Lines:
        """Axes that are computed, and arguments that are axes."""
        lines: Lines = []
        for name, text in self.op.values.items():
            computed = self.names.computed(name)
            if self.planned and name in self.names.static:
                given = next(n for n in names_in(text) if n in self.names.arguments)
                lines += unless(
                    f"({computed}) == s_{name}",
                    f"wrong_value(where, {given!r}, f'such that {name} is {{s_{name}!r}}', {given})",
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
        """Sizes that are told more than once."""
        lines: Lines = []
        for item in self.items:
            shape, x = Shape(item.shape), self.tensor(item)
            sizes = [self.expression(size) for size in shape.sizes]
            if shape.flat:
                test, expected = f"{x}.numel() == {sizes[0]}", f"({sizes[0]},)"
            elif all(self.told.get(size) == item.name for size in shape.sizes) and (
                not shape.leading or self.lead == item.name
            ):
                continue
            else:
                expected = tuple_of([*(["*lead"] if shape.leading else []), *sizes])
                test = f"tuple({x}.shape) == {expected}"
            others = {name: self.told[name] for name in self.names.of(item.shape) if name in self.told}
            told = "".join(f", {name} as in {other}" for name, other in others.items() if other != item.name)
            error = f"wrong_shape(where, {item.name!r}, {item.shape!r}, {expected}, {x}, {told!r})"
            absent = [n for n in shape.sizes if n in self.names.static and n in self.names.only_in(item.name)]
            if self.planned and absent and isinstance(item, Tensor) and item.optional:
                lines += unless(
                    f"{x} is not None or s_{absent[0]} == 0", f"wrong_value(where, {x!r}, 'given', {x})"
                )
            lines += self.guarded(item, unless(test, error))
        return lines

    def kinds(self) -> Lines:
        """Dtypes, devices and strides."""
        lines: Lines = []
        seen: dict[str, str] = {}
        for item in self.items:
            x = self.tensor(item)
            if isinstance(item, Weight):
                lines += self.scheme(item, seen)
                continue
            own: Lines = []
            axis = self.names.axes.get(item.dtype)
            first = seen.setdefault(item.dtype, x)
            if self.planned:
                error = f"unplanned_dtype(where, {x!r}, d_{item.dtype}, {x})"
                own += unless(f"{x}.dtype is d_{item.dtype}", error)
            elif axis is None:
                own += unless(
                    f"{x}.dtype is d_{item.dtype}", f"wrong_dtype(where, {x!r}, [d_{item.dtype}], {x})"
                )
            elif first == x and self.names.dtype_of(axis.name):
                own += self.alternative(x, axis, seen)
            elif first == x:
                own.append(f"s_{axis.name} = names_{axis.name}.get({x}.dtype)")
                own += unless(
                    f"s_{axis.name} is not None", f"wrong_dtype(where, {x!r}, names_{axis.name}, {x})"
                )
            else:
                error = f"other_dtype(where, {x!r}, {x}, {first!r}, {first}.dtype)"
                own += unless(f"{x}.dtype is {first}.dtype", error)
            own += self.device(x, x)
            test = (
                f"{x}.is_contiguous()" if item.strides == CONTIGUOUS else f"STRIDES_OF[{item.strides!r}]({x})"
            )
            own += unless(test, f"wrong_strides(where, {x!r}, {item.strides!r}, {x})")
            if item.strides != CONTIGUOUS and (item.mutable or item in self.op.returns):
                own += unless(f"apart({x})", f"overlapping(where, {x!r}, {x})")
            lines += self.guarded(item, own)
        return lines

    def alternative(self, x: str, axis: Axis, seen: dict[str, str]) -> Lines:
        """The axis of a tensor that has another one's dtype, or one of its own."""
        same = self.names.dtype_of(axis.name)
        first = seen[same]
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

    def scheme(self, item: Weight, seen: dict[str, str]) -> Lines:
        lines = self.device(item.name, f"w_{item.name}")
        if item.scheme in seen:
            expected = f'f"of {seen[item.scheme]}\'s scheme {{s_{item.scheme}}}"'
            error = f"wrong_value(where, {item.name!r}, {expected}, scheme_{item.name})"
            return [*lines, *unless(f"scheme_{item.name} == s_{item.scheme}", error)]
        seen[item.scheme] = item.name
        return [*lines, f"s_{item.scheme} = scheme_{item.name}"]

    def scalars(self) -> Lines:
        """Bounds of numbers; sizes that a number repeats; packed weights of a plan."""
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
        """The hand-written checks."""
        lines: Lines = []
        for index, rule in enumerate(self.op.rules):
            if self.planned and not self.names.changes(rule):
                continue
            lines.append(f"wrong = rule_{index}({self.names.call(rule, self.planned)})")
            lines += unless("wrong is None", "ValueError(f'{where}: {wrong}')")
        return lines

    def lines(self) -> Lines:
        """All of them, in an order in which each may count on those before it."""
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


def scalar_bounds(names: Names, scalar: Scalar, which: tuple[str, ...]) -> Lines:
    """The checks of a number: its declared bounds, and that it equals the size it states."""
    name, lines = scalar.name, Lines()
    if scalar.states:
        size = f"s_{scalar.states}"
        error = f"wrong_value(where, {name!r}, f'0 or the {scalar.states} of the weight, {{{size}}}', {name})"
        lines += unless(f"{name} == 0 or {name} == {size}", error)
    if "bounds" not in which:
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
    """What is wrong with the first packed tensor, as a condition."""
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
