"""The checks of a call against the declared arguments of its operation, in order.

A check is a condition and a message, as Python source. The functions of an operation (`argument_functions`) test all conditions at
once; where that fails they are tested one by one, to name the first fault.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable
from inspect import signature
from typing import Any, NamedTuple

from gristmill.kernel_registry.argument_names import Shape, is_name, names_in, solve
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


Item = Tensor | Weight
Step = str | Check
"""A check, or a statement between checks that assigns variables."""


def shown(declared: str) -> str:
    """A declared shape as messages print it: ``... n`` as ``[..., n]``."""
    return f"{declared} elements" if declared.startswith("(") else f"[{declared.replace(' ', ', ')}]"


Extent = tuple[str, Item, str, str, str]
"""Where a call has a size: its name, the argument, source of the dimension, and the operator and operand that leave the size of it."""


class Checks:
    """The checks of the calls of one operation: without a plan, which derive all axes, or with one, which has fixed the static axes.

    sizes: names that shapes determine. static: axes that a plan fixes, and the arguments that its flags fix. stated: optional tensors
    whose presence a plan fixes. scalar_axes: scalars that are static axes. values: names with a variable ``s_<name>``. own:
    names that mean the argument in the expression of a computed axis. constants: expressions that a plan fixes -> their variables.
    """

    def __init__(self, op: Declared, planned: bool = False) -> None:
        self.op, self.planned = op, planned
        self.axes = {axis.name: axis for axis in op.axes}
        self.arguments: tuple[str, ...] = tuple(a.name for a in op.arguments)
        self.tensors = [a for a in op.arguments if isinstance(a, Tensor)]
        self.optional = {tensor.name for tensor in self.tensors if tensor.optional}
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
        self.own = {*self.arguments} - self.sizes
        schemes = {weight.scheme for weight in self.weights}
        self.values = self.sizes.union(op.values, dtypes, schemes, self.static if planned else ())
        self.steps: list[Step] = []
        self.constants: dict[str, str] = {}
        declared = [*self.tensors, *(op.returns if planned else self.weights)]
        self.items: list[Item] = sorted(declared, key=lambda item: item.optional)
        self.first = self.tensors[0].name
        self.firsts: dict[str, str] = {}  # an axis of dtypes or schemes -> the first argument that has it
        self.lead = next((item for item in self.items if Shape(item.shape).leading), None)
        self.leading = f"shape_{self.lead.name}[:-{len(Shape(self.lead.shape).sizes)}]" if self.lead else ""

    def all(self) -> tuple[list[Step], str]:
        """All checks, each of which may rely on those before it, and source of what the function returns: axis values or, of a planned
        call, its size on the bucket axis."""
        self.dims(self.items)
        extents = self.assign_sizes(self.items, () if self.planned else ("", " - ", " // "))
        self.check_axes()
        self.check_shapes({name: item.name for name, item, *_ in extents})
        for item in self.items:
            self.kind(item)
        for scalar in self.scalars:
            self.bounds(scalar)
        for weight in self.weights if self.planned else ():
            self.packed(weight)
        for index, rule in enumerate(self.op.rules):
            names = signature(rule).parameters
            call = f"rule_{index}({', '.join(self.resolve(name, self.own) for name in names)})"
            if not self.planned or not self.static.issuperset(names):
                self.steps.append(Check(f"{call} is None", f"{{{call}}}"))
        if self.planned:
            read = re.findall(r"\w+", " ".join(s if isinstance(s, str) else s.condition for s in self.steps))
            arguments = [name for name in (*self.arguments, *self.op.outputs) if name in read]
            self.steps[:0] = [f"{name} = call.{name}" for name in arguments]
        return self.steps, self.bucket_size() if self.planned else self.axis_values()

    def bucket_size(self) -> str:
        """Source of a planned call's size on the bucket axis; at least 1 if an output has elements at size 0 too."""
        bucket, size = self.op.bucket, f"s_{self.op.bucket}"
        if self.lead is not None:
            size = f"{self.lead.name}.numel() // {self.size('*'.join(Shape(self.lead.shape).sizes))}"
        scaled = [Shape(o.shape).leading or bucket in self.names_of(o.shape) for o in self.op.returns]
        return "1" if bucket is None else size if all(scaled) else f"max(1, {size})"

    def outputs(self) -> tuple[list[Step], str]:
        """The checks of arguments that determine outputs, and source of ((shape, dtype), ...).

        They run under fake tensors, whose sizes are symbols: no size is compared with another argument's.
        """
        same = {t.shape: t.name for t in reversed(self.tensors) if not t.optional and " " in t.shape}
        stated = {scalar.states: scalar.name for scalar in self.scalars if scalar.states}
        extents = [extent for extent in self.extents(self.items) if extent[0] not in stated]
        sources = {name: operand for name, *_, operand in extents} | dict(self.op.values)
        sources |= {scalar.name: str(scalar.maximum) for scalar in self.scalars}
        shapes = [item.shape for item in self.op.returns if item.shape not in same]
        needed = [name for shape in shapes for name in self.names_of(shape)]
        for name in needed:  # grows
            needed += [n for n in names_in(sources.get(name) or "0") if n not in needed]
        is_leading = self.op.bucket in needed or any(Shape(shape).leading for shape in shapes)
        used = [self.lead] * is_leading + [item for name, item, *_ in extents if name in needed]
        for weight in self.weights:
            for size in stated.keys() & {*weight.shape.split()}.intersection(needed):
                arguments = f"where, {weight.name!r}, {weight.shape!r}, {weight.name}, {stated[size]}"
                self.steps.append(f"s_{size} = stated_size({arguments})")
        items = [item for item in self.items if item in used]
        self.dims(items)
        self.assign_sizes(items, (" - ",), stated)
        for scalar in self.scalars:
            if scalar.name in needed and not scalar.states:
                self.bounds(scalar)
        for axis in [axis for axis in self.op.values if axis in needed]:
            self.steps.append(f"s_{axis} = {self.resolve(self.op.values[axis], self.own)}")
        outputs = []
        for item in self.op.returns:
            owner = next((t.name for t in self.tensors if t.dtype == item.dtype in self.axes), "")
            like = same.get(item.shape)
            shape = f"{like}.shape" if like else self.shape_tuple(item, self.resolve)
            outputs.append(f"({shape}, {f'{owner}.dtype' if owner else f'd_{item.dtype}'}),")
        return self.steps, f"({' '.join(outputs)})"

    def shape(self, condition: str, item: Item, expected: str, **more: Any) -> None:
        """Add a check of a shape."""
        message = f"{item.name} must be {shown(item.shape)}{expected}, got {{list({item.name}.shape)}}"
        self.steps.append(Check(condition, message, item.name * item.optional, **more))

    def value(self, condition: str, name: str, expected: str, got: str = "") -> None:
        """Add a check of a number, flag or string, or of whether a tensor is given."""
        self.steps.append(Check(condition, f"{name} must be {expected}, got {{value_of({got or name})}}"))

    def constant(self, source: str, *texts: str) -> str:
        """`source`, or its variable if a plan fixes all names in the expressions that it is made of."""
        fixed = self.planned and all(self.static.issuperset(names_in(text)) for text in texts)
        return self.constants.setdefault(source, f"h_{len(self.constants)}") if fixed else source

    def size(self, text: str) -> str:
        """Source of a size; a constant where it is an expression that a plan fixes."""
        resolved = self.resolve(text)
        return resolved if is_name(text) or text.isdigit() else self.constant(resolved, text)

    def shape_tuple(self, item: Item, source: Callable[[str], str]) -> str:
        """Source of the declared shape, from that of each size."""
        shape = Shape(item.shape)
        sizes = [f"*{self.leading}"] * shape.leading + [*map(source, shape.sizes)]
        return f"({''.join(f'{size}, ' for size in sizes)})"

    def dims(self, items: Iterable[Item]) -> None:
        """Types and numbers of dimensions. Weights get a description."""
        for item in items:
            if isinstance(item, Tensor) and not item.optional:
                message = f"{item.name} must be a tensor, got {{type({item.name}).__name__}}"
                self.steps.append(Check(f"hasattr({item.name}, 'dim')", message, "", TypeError, self.planned))
        for item in items:
            shape = Shape(item.shape)
            if isinstance(item, Weight):
                first = self.firsts.setdefault(item.scheme, item.name) == item.name
                targets = f"{item.name}, {'s' if first else item.name}_{item.scheme}, order_{item.name}"
                arguments = f"where, {item.name!r}, {shown(item.shape)!r}, {item.name}"
                self.steps.append(f"{targets} = dense_or_quantized({arguments})")
                self.shape(f"len({item.name}.shape) == {len(shape.sizes)}", item, "")
            elif not shape.flat:
                own = [name for name in self.names_of(item.shape) if name in self.axes]
                legend = f" ({'; '.join(f'{name}: {self.axes[name].help}' for name in own)})" if own else ""
                legend = legend.replace("{", "{{").replace("}", "}}")
                condition = f"{item.name}.dim() {'>=' if shape.leading else '=='} {len(shape.sizes)}"
                self.shape(condition, item, legend, implied=self.planned)

    def assign_sizes(
        self, items: Collection[Item], checked: Collection[str], known: Iterable[str] = ()
    ) -> list[Extent]:
        """Sizes that `items` determine, except those that are `known`. checked: the operators whose results are checked to be whole
        numbers and not below the minimum of their axis."""
        extents = self.extents(items, known)
        for item in items:
            absent = f"None if {item.name} is None else " if item.optional else ""
            self.steps.append(f"shape_{item.name} = {absent}{item.name}.shape")
        if self.lead is not None and self.lead in items and not self.planned:
            self.steps.append(f"s_{self.op.bucket} = prod({self.leading})")
        for name, item, extent, operator, operand in extents:
            axis, other = self.axes.get(name), operand and self.resolve(operand)
            absent = f"0 if {item.name} is None else " if item.optional else ""
            self.steps.append(f"s_{name} = {absent}{extent}{operator}{other}")
            if operator == " // " and operator in checked:
                self.shape(f"{extent} % {other} == 0", item, f" with {name} a whole number")
            if axis and not item.optional and operator in checked and (axis.minimum or operator == " - "):
                where = f" where {operand} is {{{other}}}" * (operator == " - " and not operand.isdigit())
                expected = f" with {name} at least {axis.minimum}{where}"
                self.shape(f"s_{name} >= {axis.minimum}", item, expected)
        return extents

    def check_axes(self) -> None:
        """Computed axes, and arguments that have the values that a plan fixes."""
        for name, text in self.op.values.items():
            if self.planned and name in self.static:
                argument = next(n for n in names_in(text) if n in self.arguments)
                expected = f"such that {name} is {{s_{name}!r}}"
                self.value(f"({self.resolve(text, self.own)}) == s_{name}", argument, expected)
            else:
                self.steps.append(f"s_{name} = {self.resolve(text, self.own)}")
        for name in self.stated if self.planned else ():
            self.value(f"({name} is not None) is s_{name}", name, f"{{'given' if s_{name} else None}}")
        for name in self.scalar_axes if self.planned else ():
            self.value(f"{name} == s_{name}", name, f"{{s_{name}!r}}")

    def check_shapes(self, owners: dict[str, str]) -> None:
        """Sizes that more than one argument determines. owners: a size -> the first argument that does."""
        shaped: dict[str, str] = {}
        for item in self.items:
            shape, x, own = Shape(item.shape), f"shape_{item.name}", self.names_of(item.shape)
            first = shaped.get(item.shape, x) if item.optional else shaped.setdefault(item.shape, x)
            alone = [size for size in shape.sizes if size in self.static & self.only_in(item.name)]
            if self.planned and alone and item.optional:
                self.value(f"{item.name} is not None or s_{alone[0]} == 0", item.name, "given")
            if shape.flat:
                condition = f"{item.name}.numel() == {self.size(item.shape)}"
            elif first != x:
                condition = f"{x} == {first}"
            elif item is self.lead:
                condition = " and ".join(f"{x}[{i}] == {self.size(size)}" for i, size in shape.places())
            else:
                parts = [*shape.sizes, *[str(self.op.bucket)] * shape.leading]
                condition = f"{x} == {self.constant(self.shape_tuple(item, self.size), *parts)}"
            others = [name for name in own if owners.get(name, item.name) != item.name]
            origins = "".join(f", {name} as in {owners[name]}" for name in others)
            self.shape(condition, item, f" = {{list({self.shape_tuple(item, self.resolve)})}}{origins}")

    def kind(self, item: Item) -> None:
        """The dtype or scheme of an argument, its device and its strides."""
        x, first = item.name, self.first
        if isinstance(item, Tensor):
            self.dtype(item)
        if x != first:
            message = f"{x} is on {{{x}.device}}, {first} on {{{first}.device}}"
            condition = f"{x}.device == {first}.device"
            self.steps.append(Check(condition, message, x * item.optional, implied=self.planned))
        if isinstance(item, Tensor):
            self.strides(item)
        elif self.firsts[item.scheme] != x:
            other, axis, own = self.firsts[item.scheme], f"s_{item.scheme}", f"{x}_{item.scheme}"
            self.value(f"{own} == {axis}", x, f"of {other}'s scheme {{{axis}}}", own)

    def dtype(self, item: Tensor) -> None:
        """The dtype of a tensor. Without a plan, the first tensor of a dtype axis determines it; absent, it is the default."""
        if not item.dtype:
            return
        x, axis, first = item.name, item.dtype, self.firsts.setdefault(item.dtype, item.name)
        condition, expected = f"{x}.dtype is d_{axis}", f"be {{d_{axis}}}"
        if not self.planned and first != x and axis in self.axes:
            condition, expected = f"{x}.dtype is {first}.dtype", f"have {first}'s dtype {{{first}.dtype}}"
            if first in self.optional:
                condition = f"{first} is None or {condition}"
        elif not self.planned and axis in self.axes:
            names = [name for name in self.axes[axis].choices or TORCH_NAMES if name in TORCH_NAMES]
            choices = " or ".join(f"torch.{TORCH_NAMES[name]}" for name in names)
            value = f"{{{', '.join(f'd_{name}: {name!r}' for name in names)}}}.get({x}.dtype)"
            condition, expected = f"s_{axis} is not None", f"be {choices}"
            same = next((choice for choice in self.axes[axis].choices if choice in self.axes), "")
            if same:
                like = f"{self.firsts[same]}.dtype"
                value = f"{same!r} if {x}.dtype is {like} else {value}"
                expected = f"have {self.firsts[same]}'s dtype {{{like}}} or {choices}"
            if item.optional:
                value = f"{self.axes[axis].default!r} if {x} is None else {value}"
            self.steps.append(f"s_{axis} = {value}")
        message, kind = f"{x} must {expected}, got {{{x}.dtype}}", ValueError if self.planned else TypeError
        self.steps.append(Check(condition, message, x * item.optional, kind))

    def strides(self, item: Tensor) -> None:
        """The strides of a tensor; no two elements of one that is written share memory."""
        x, given, condition = item.name, item.name * item.optional, f"{item.name}.is_contiguous()"
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
        *outer, last = Shape(item.shape).sizes
        if item.strides != VECTORS or Shape(item.shape).leading:
            return ""
        strides, span = f"t_{item.name}", self.size(last)
        tests = [f"({strides} := {item.name}.stride())[{len(outer)}] == 1"]
        for place, size in reversed([*enumerate(outer)]):
            tests.append(f"{strides}[{place}] >= {span}")
            span = f"{strides}[{place}] * ({self.size(size)} - 1) + {span}"
        return f"{' and '.join(tests)} or "

    def bounds(self, scalar: Scalar) -> None:
        """The size that a number repeats; without a plan, the bounds of a number, flag or string."""
        name, minimum = scalar.name, scalar.minimum
        if scalar.states:
            expected = f"0 or the {scalar.states} of the weight, {{s_{scalar.states}}}"
            self.value(f"{name} == s_{scalar.states} or {name} == 0", name, expected)
        if self.planned:
            return
        axis = self.axes.get(name) if name in self.scalar_axes else None
        minimum = axis.minimum if minimum is None and scalar.kind == "int" and axis else minimum
        if minimum is not None:
            self.value(f"{name} >= {minimum!r}", name, f"at least {minimum:g}")
        if scalar.maximum is not None:
            most = self.resolve(str(scalar.maximum))
            origin = f" ({scalar.maximum})" if isinstance(scalar.maximum, str) else ""
            self.value(f"{name} <= {most}", name, f"at most {{{most}}}{origin}")
        if scalar.finite:
            self.value(f"isfinite({name})", name, "finite")
        if axis is not None and axis.choices:
            self.value(f"{name} in {axis.choices!r}", name, f"one of {', '.join(axis.choices)}")

    def packed(self, weight: Weight) -> None:
        """A packed weight with as many tensors as the layout of the plan has, whose first one can hold the codes of the planned weight."""
        x, device, sizes = f"first_{weight.name}", f"{self.first}.device", weight.shape.split()
        needed = f"code_bytes(s_{weight.scheme}, {self.shape_tuple(weight, self.resolve)})"
        least = self.constant(needed, weight.scheme, *sizes)
        experts = f"{x}.shape[0] == s_{sizes[0]} and " if len(sizes) > 2 else ""
        condition = f"{experts}{x}.nbytes >= {least} and {x}.device == {device} and {x}.is_contiguous()"
        message = (
            f"{weight.name} must begin with a contiguous tensor of at least {{{least}}} bytes on {{{device}}}, packed for this plan; "
            f"got {{list({x}.shape)}} {{{x}.dtype}} on {{{x}.device}}"
        )
        counted = f"not packed_count or len({weight.name}) == packed_count"
        count = (
            f"{weight.name} must be the {{packed_count}} tensors of {{packed_as}}, got {{len({weight.name})}}"
        )
        self.steps += [f"{x} = {weight.name}[0]", Check(counted, count), Check(condition, message)]

    def names_of(self, shape: str) -> list[str]:
        """The names in a shape."""
        return list(dict.fromkeys(name for size in Shape(shape).sizes for name in names_in(size)))

    def only_in(self, argument: str) -> set[str]:
        """Sizes that only this argument determines."""
        elsewhere = {n for name, s in self.shapes.items() if name != argument for n in self.names_of(s)}
        return self.sizes.intersection(self.names_of(self.shapes.get(argument, ""))) - elsewhere

    def extents(self, items: Collection[Item], known: Iterable[str] = ()) -> list[Extent]:
        """The sizes that `items` determine, in the order in which they can be computed: plain names first, then names inside an
        expression. ValueError for an expression that cannot be solved."""
        known = {*known, *(self.static if self.planned else ())}
        known |= {str(self.op.bucket)} if self.lead in items else set()
        places = [(item, *place) for item in items for place in Shape(item.shape).places()]
        found: list[Extent] = []
        for item, place, size in sorted(places, key=lambda entry: not is_name(entry[2])):
            unknown = self.sizes.intersection(names_in(size)) - known
            if len(unknown) == 1:
                known.add(name := unknown.pop())
                found.append((name, item, f"shape_{item.name}[{place}]", *solve(self.op.name, size, name)))
        return found

    def resolve(self, text: str, arguments: Collection[str] = ()) -> str:
        """Source of an expression of sizes and arguments. arguments: names that are those of arguments, not of values."""
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in self.values.difference(arguments):
                node.id = f"s_{node.id}"
            elif isinstance(node, ast.Name) and node.id not in (*self.arguments, "min", "max"):
                wrong = f"{node.id} is neither a size of its arguments nor one of them"
                raise ValueError(f"{self.op.name}: {wrong}")
        return ast.unparse(tree)

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
