"""The checks of a call against the declared arguments of its operation, in order.

A check is a condition and a message, as Python source. The functions of an operation (`argument_functions`) test all conditions at
once; where that fails, `fault` tests them one by one, and names the first fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gristmill.kernel_registry.argument_names import Extent, Names, Shape, is_name, names_in
from gristmill.kernel_registry.argument_values import shown
from gristmill.kernel_registry.arguments import CONTIGUOUS, STRIDES, VECTORS, Declared, Scalar, Tensor, Weight
from gristmill.kernel_registry.dtypes import TORCH_NAMES


class Check(NamedTuple):
    """A condition of valid calls, and the message of the error, the inside of an f-string.

    given: the optional argument without which the condition holds. implied: by later conditions, or not needed where there is a plan:
    it only makes for a better message.
    """

    condition: str
    message: str
    given: str = ""
    kind: type[Exception] = ValueError
    implied: bool = False


Step = str | Check
"""A check, or a statement between checks that assigns variables."""


def tuple_of(items: Iterable[str]) -> str:
    """Source of a tuple."""
    return f"({''.join(f'{item}, ' for item in items)})"


class Checks:
    """The checks of the calls of one operation: without a plan, which derive all axes, or with one, which has fixed the static axes.

    steps: those added so far. constants: variables of expressions that a plan fixes.
    """

    def __init__(self, op: Declared, planned: bool = False) -> None:
        self.op, self.planned = op, planned
        names = self.names = Names(op, planned)
        self.steps: list[Step] = []
        self.constants: dict[str, str] = {}
        self.items: list[Tensor | Weight] = [*names.tensors, *(op.returns if planned else names.weights)]
        self.items.sort(key=lambda item: item.optional)
        self.first = names.tensors[0].name
        self.firsts: dict[str, str] = {}  # an axis of dtypes or schemes -> the first argument that has it
        self.lead = next((item for item in self.items if Shape(item.shape).leading), None)
        self.leading = f"shape_{self.lead.name}[:-{len(Shape(self.lead.shape).sizes)}]" if self.lead else ""

    def all(self) -> list[Step]:
        """Add all checks. Each may rely on those before it."""
        self.dims(self.items)
        extents = self.sizes(self.items)
        if not self.planned:
            self.minimums(extents)
        self.axes()
        self.shapes({extent.name: extent.item.name for extent in extents})
        self.kinds()
        for scalar in self.names.scalars:
            if scalar.states:
                name, size = scalar.name, f"s_{scalar.states}"
                self.value(
                    f"{name} == {size} or {name} == 0",
                    name,
                    f"0 or the {scalar.states} of the weight, {{{size}}}",
                )
            if not self.planned:
                self.bounds(scalar)
        if self.planned:
            self.packed()
        self.steps += [Check(f"{call} is None", f"{{{call}}}") for call in self.names.rules()]
        return self.steps

    def outputs(self) -> str:
        """Add the checks of arguments that determine outputs. Returns source of ((shape, dtype), ...).

        It runs under fake tensors, whose sizes are symbols: no size is compared with another argument's.
        """
        names, op = self.names, self.op
        same = {t.shape: t.name for t in reversed(names.tensors) if not t.optional and " " in t.shape}
        shapes = [Shape(item.shape) for item in op.returns if item.shape not in same]
        needed = {name for shape in shapes for size in shape.sizes for name in names_in(size)}
        computed = [axis for axis in op.values if axis in needed]
        needed.update(name for axis in computed for name in names_in(op.values[axis]))
        scalars = [scalar for scalar in names.scalars if scalar.name in needed and not scalar.states]
        needed.update(name for scalar in scalars for name in names_in(str(scalar.maximum)))
        stated = {scalar.states: scalar.name for scalar in names.scalars if scalar.states}
        used = [self.lead] if op.bucket in needed or any(shape.leading for shape in shapes) else []
        for extent in reversed(names.extents(self.items)):
            if extent.name in needed - stated.keys():
                used.append(extent.item)
                needed.update(names_in(extent.size))
        for weight in names.weights:
            for size in needed & stated.keys() & {*weight.shape.split()}:
                arguments = f"where, {weight.name!r}, {weight.shape!r}, {weight.name}, {stated[size]}"
                self.steps.append(f"s_{size} = stated_size({arguments})")
        items = [item for item in self.items if item in used]
        self.dims(items)
        self.minimums([extent for extent in self.sizes(items, stated) if extent.operator == "-"])
        for scalar in scalars:
            self.bounds(scalar)
        self.steps += [f"s_{axis} = {names.computed(axis)}" for axis in computed]
        return tuple_of(self.output(item, same.get(item.shape)) for item in op.returns)

    def output(self, item: Tensor, same: str | None) -> str:
        """Source of (shape, dtype) of an output, with the shape of the tensor `same` if there is one."""
        shape = Shape(item.shape)
        sizes = tuple_of([f"*{self.leading}"] * shape.leading + [*map(self.names.resolve, shape.sizes)])
        owner = next((t.name for t in self.names.tensors if t.dtype == item.dtype), "")
        dtype = f"{owner}.dtype" if item.dtype in self.names.axes and owner else f"d_{item.dtype}"
        return f"({same}.shape, {dtype})" if same else f"({sizes}, {dtype})"

    def bucket_size(self) -> str:
        """Source of a planned call's size on the bucket axis; at least 1 if an output has elements at size 0 too."""
        bucket = self.op.bucket
        if bucket is None:
            return "1"
        size = f"s_{bucket}"
        if self.lead is not None:
            size = f"{self.lead.name}.numel() // {self.size('*'.join(Shape(self.lead.shape).sizes))}"
        shapes = [item.shape for item in self.op.returns]
        scaled = all(Shape(shape).leading or bucket in self.names.names_of(shape) for shape in shapes)
        return size if scaled else f"max(1, {size})"

    def need(self, item: Tensor | Weight, condition: str, expected: str, **more: Any) -> None:
        """Add a check of a tensor or a described weight."""
        message = f"{item.name} must be {expected}, got {{list({self.variable(item)}.shape)}}"
        self.steps.append(Check(condition, message, item.name * item.optional, **more))

    def value(self, condition: str, name: str, expected: str) -> None:
        """Add a check of a number, flag or string, or of whether a tensor is given."""
        self.steps.append(Check(condition, f"{name} must be {expected}, got {{value_of({name})}}"))

    def variable(self, item: Tensor | Weight) -> str:
        """The variable of a tensor or of a described weight."""
        return item.name if isinstance(item, Tensor) else f"w_{item.name}"

    def shape_of(self, item: Tensor | Weight) -> str:
        """Source of the shape of an argument."""
        return f"{item.name}.shape" if item.optional else f"shape_{item.name}"

    def size(self, text: str) -> str:
        """Source of a size; a constant where it is an expression that a plan fixes."""
        resolved = self.names.resolve(text)
        return resolved if is_name(text) or text.isdigit() else self.constant(resolved, names_in(text))

    def constant(self, source: str, names: Iterable[str]) -> str:
        """The variable of an expression if a plan fixes all its names, else the expression."""
        if not self.planned or not self.names.static.issuperset(names):
            return source
        variable = next(
            (v for v, text in self.constants.items() if text == source), f"h_{len(self.constants)}"
        )
        self.constants[variable] = source
        return variable

    def dims(self, items: Iterable[Tensor | Weight]) -> None:
        """Types and numbers of dimensions. Weights get a description."""
        axes = self.names.axes
        for item in items:
            if isinstance(item, Tensor) and not item.optional:
                message = f"{item.name} must be a tensor, got {{type({item.name}).__name__}}"
                self.steps.append(
                    Check(f"hasattr({item.name}, 'dim')", message, kind=TypeError, implied=self.planned)
                )
        for item in items:
            shape = Shape(item.shape)
            if isinstance(item, Weight):
                first = self.firsts.setdefault(item.scheme, item.name) == item.name
                scheme = f"s_{item.scheme}" if first else f"scheme_{item.name}"
                arguments = f"where, {item.name!r}, {item.shape!r}, {item.name}"
                self.steps.append(
                    f"w_{item.name}, {scheme}, order_{item.name} = dense_or_quantized({arguments})"
                )
            elif not shape.flat:
                own = [name for name in self.names.names_of(item.shape) if name in axes]
                legend = f" ({'; '.join(f'{name}: {axes[name].help}' for name in own)})" if own else ""
                legend = legend.replace("{", "{{").replace("}", "}}")
                condition = f"{item.name}.dim() {'>=' if shape.leading else '=='} {len(shape.sizes)}"
                self.need(item, condition, f"{shown(item.shape)}{legend}", implied=self.planned)

    def sizes(self, items: Iterable[Tensor | Weight], known: Iterable[str] = ()) -> list[Extent]:
        """Assign the sizes that `items` determine, except those that are `known`."""
        extents = self.names.extents(items, known)
        self.steps += [
            f"shape_{item.name} = {self.variable(item)}.shape" for item in items if not item.optional
        ]
        if self.lead is not None and self.lead in items and not self.planned:
            self.steps.append(f"s_{self.op.bucket} = prod({self.leading})")
        self.steps += [f"s_{extent.name} = {extent.source(self.shape_of(extent.item))}" for extent in extents]
        return extents

    def minimums(self, extents: Iterable[Extent]) -> None:
        """Sizes that are whole numbers and not below the minimum of their axis."""
        for extent in extents:
            name, item, axis = extent.name, extent.item, self.names.axes.get(extent.name)
            expected = f"{shown(item.shape)} with {name}"
            if extent.operator == "//":
                condition = f"{self.shape_of(item)}[{extent.place}] % {extent.operand} == 0"
                self.need(item, condition, f"{expected} a whole number")
            if axis is not None and not item.optional and (axis.minimum or extent.operator == "-"):
                expected += f" at least {axis.minimum}"
                if extent.operator == "-" and not extent.operand.isdigit():
                    expected += f" where {extent.operand.replace('s_', '')} is {{{extent.operand}}}"
                self.need(item, f"s_{name} >= {axis.minimum}", expected)

    def axes(self) -> None:
        """Computed axes, and arguments that have the values that a plan fixes."""
        names = self.names
        for name, text in self.op.values.items():
            if self.planned and name in names.static:
                argument = next(n for n in names_in(text) if n in names.arguments)
                expected = f"such that {name} is {{s_{name}!r}}"
                self.value(f"({names.computed(name)}) == s_{name}", argument, expected)
            else:
                self.steps.append(f"s_{name} = {names.computed(name)}")
        for name in names.stated if self.planned else ():
            self.value(f"({name} is not None) is s_{name}", name, f"{{'given' if s_{name} else None}}")
        for name in names.scalar_axes if self.planned else ():
            self.value(f"{name} == s_{name}", name, f"{{s_{name}!r}}")

    def shapes(self, owners: dict[str, str]) -> None:
        """Sizes that more than one argument determines. owners: a size -> the first argument that does."""
        names, shaped = self.names, dict[str, str]()
        for item in self.items:
            shape, x, own = Shape(item.shape), self.shape_of(item), names.names_of(item.shape)
            first = shaped.get(item.shape, x) if item.optional else shaped.setdefault(item.shape, x)
            lead = [f"*{self.leading}"] * shape.leading
            expected = tuple_of([*lead, *map(names.resolve, shape.sizes)])
            alone = [size for size in shape.sizes if size in names.static & names.only_in(item.name)]
            if self.planned and alone and item.optional:
                self.value(f"{item.name} is not None or s_{alone[0]} == 0", item.name, "given")
            if shape.flat:
                condition = f"{item.name}.numel() == {self.size(item.shape)}"
            elif first != x:
                condition = f"{x} == {first}"
            elif (
                not self.planned
                and all(owners.get(size) == item.name for size in shape.sizes)
                and (not shape.leading or item is self.lead)
            ):
                continue
            elif item is self.lead:
                condition = " and ".join(
                    f"{x}[{place}] == {self.size(size)}" for place, size in shape.places()
                )
            elif not shape.leading and names.static.issuperset(own):
                condition = f"{x} == {self.constant(expected, own)}"
            else:
                condition = f"{x} == {tuple_of([*lead, *map(self.size, shape.sizes)])}"
            others = {name: owners[name] for name in own if owners.get(name, item.name) != item.name}
            origins = "".join(f", {name} as in {owner}" for name, owner in others.items())
            self.need(item, condition, f"{shown(item.shape)} = {{list({expected})}}{origins}")

    def kinds(self) -> None:
        """Dtypes and schemes, devices, strides."""
        assigned = []
        for item in self.items:
            x, first = self.variable(item), self.first
            if isinstance(item, Tensor):
                assigned += self.dtype(item)
            if x != first:
                message = f"{item.name} is on {{{x}.device}}, {first} on {{{first}.device}}"
                condition, given = f"{x}.device == {first}.device", item.name * item.optional
                self.steps.append(Check(condition, message, given, implied=self.planned))
            if isinstance(item, Tensor):
                self.strides(item)
            elif self.firsts[item.scheme] != item.name:
                expected = f"of {self.firsts[item.scheme]}'s scheme {{s_{item.scheme}}}"
                scheme = f"scheme_{item.name}"
                message = f"{item.name} must be {expected}, got {{{scheme}!r}}"
                self.steps.append(Check(f"{scheme} == s_{item.scheme}", message))
        self.steps += assigned

    def dtype(self, item: Tensor) -> list[str]:
        """The dtype of a tensor. Without a plan the first one of a dtype axis determines it, by the assignment that is returned."""
        x, name, names = item.name, item.dtype, self.names
        first, own, other, assigned = (
            self.firsts.setdefault(name, x),
            f"names_{name}",
            names.dtype_of(name),
            [],
        )
        if self.planned or name not in names.axes:
            condition, expected = f"{x}.dtype is d_{name}", f"be {{d_{name}}}"
        elif first != x:
            condition, expected = f"{x}.dtype is {first}.dtype", f"have {first}'s dtype {{{first}.dtype}}"
        else:
            condition, value = f"{x}.dtype in {own}", f"{own}[{x}.dtype]"
            choices = [f"torch.{TORCH_NAMES[choice]}" for choice in names.dtypes(name)]
            expected = f"be {' or '.join(choices)}"
            if other:
                like = f"{self.firsts[other]}.dtype"
                condition, value = (
                    f"{x}.dtype is {like} or {condition}",
                    f"{other!r} if {x}.dtype is {like} else {value}",
                )
                expected = (
                    f"have {self.firsts[other]}'s dtype {{{like}}}{''.join(f' or {d}' for d in choices)}"
                )
            assigned = [f"s_{name} = {value}"]
        kind = ValueError if self.planned else TypeError
        message = f"{x} must {expected}, got {{{x}.dtype}}"
        self.steps.append(Check(condition, message, x * item.optional, kind))
        return assigned

    def strides(self, item: Tensor) -> None:
        """The strides of a tensor; no two elements of one that is written share memory."""
        x, given = item.name, item.name * item.optional
        condition = f"{x}.is_contiguous()"
        got = f"got shape {{list({x}.shape)}} with strides {{{x}.stride()}}"
        message = f"{x} must be {STRIDES[item.strides]}, {got}; call .contiguous() first"
        if item.strides != CONTIGUOUS and (item.mutable or item in self.op.returns):
            self.steps.append(Check(f"{item.strides}({x})", message, given, implied=True))
            condition = f"{condition} or {self.nested(item)}{item.strides}({x}) and apart({x})"
            message = f"{x} is written, so its elements must not overlap; {got}"
        elif item.strides == VECTORS:
            condition = f"{x}.stride(-1) == 1 or vectors({x})"
        elif item.strides != CONTIGUOUS:
            condition = f"{condition} or {item.strides}({x})"
        self.steps.append(Check(condition, message, given))

    def nested(self, item: Tensor) -> str:
        """A fast test for the usual view that is written: the stride of each dimension is at least the span of those after it."""
        shape = Shape(item.shape)
        if item.strides != VECTORS or shape.leading:
            return ""
        *outer, last = shape.sizes
        strides, span = f"t_{item.name}", self.size(last)
        tests = [f"({strides} := {item.name}.stride())[{len(outer)}] == 1"]
        for place, size in reversed([*enumerate(outer)]):
            tests.append(f"{strides}[{place}] >= {span}")
            span = f"{strides}[{place}] * ({self.size(size)} - 1) + {span}"
        return f"{' and '.join(tests)} or "

    def bounds(self, scalar: Scalar) -> None:
        """The bounds of a number, flag or string."""
        name, minimum = scalar.name, scalar.minimum
        axis = self.names.axes.get(name) if name in self.names.scalar_axes else None
        if minimum is None and scalar.kind == "int" and axis is not None:
            minimum = axis.minimum
        if minimum is not None:
            self.value(f"{name} >= {minimum!r}", name, f"at least {minimum:g}")
        if scalar.maximum is not None:
            most = self.names.resolve(str(scalar.maximum))
            origin = f" ({scalar.maximum})" if isinstance(scalar.maximum, str) else ""
            self.value(f"{name} <= {most}", name, f"at most {{{most}}}{origin}")
        if scalar.finite:
            self.value(f"isfinite({name})", name, "finite")
        if axis is not None and axis.choices:
            self.value(f"{name} in {axis.choices!r}", name, f"one of {', '.join(axis.choices)}")

    def packed(self) -> None:
        """Packed weights whose first tensor can hold the codes of the planned weight."""
        for weight in self.names.weights:
            x, least, device = f"first_{weight.name}", f"bytes_{weight.name}", f"{self.first}.device"
            sizes = weight.shape.split()
            experts = f"{x}.shape[0] == s_{sizes[0]} and " if len(sizes) > 2 else ""
            condition = f"{experts}{x}.nbytes >= {least} and {x}.device == {device} and {x}.is_contiguous()"
            message = (
                f"{weight.name} must begin with a contiguous tensor of at least {{{least}}} bytes on {{{device}}}, packed for this "
                f"plan; got {{list({x}.shape)}} {{{x}.dtype}} on {{{x}.device}}"
            )
            self.constants[least] = (
                f"code_bytes(s_{weight.scheme}, {tuple_of(map(self.names.resolve, sizes))})"
            )
            self.steps += [f"{x} = {weight.name}[0]", Check(condition, message)]
