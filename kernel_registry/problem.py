"""Problems: one concrete call of an operation, as data.

A problem is frozen, hashable, printed as ``m=16,n=4096,k=4096,x=bf16,w=int4_g128`` and parsed back from it. Axes are
declared by the operation; an axis with a default may be left out, and is left out when printed at its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gristmill.kernel_registry.dtypes import DTYPES, canonical_dtype

AxisValue = int | float | str | bool


@dataclass(frozen=True)
class Axis:
    """One named coordinate of an operation's problems.

    kind: ``int``, ``float``, ``bool``, ``dtype`` (see `canonical_dtype`), ``scheme`` (a quantization scheme), ``choice`` (one of
    ``choices``) or ``flags`` (a ``+``-joined subset of ``choices``, kept in their order; ``none`` = empty). A choice of a dtype
    axis may be the name of an earlier dtype axis; it means the dtype of that axis.
    dynamic: changes from call to call (M, token counts); everything else is fixed when a layer is built.
    opt_in: kernels that do not name it in ``supports`` refuse problems with another value than the default. So an argument that
        is added to an operation does not change what existing kernels, and those of plugins, must know.
    """

    name: str
    kind: str
    help: str
    default: AxisValue | None = None
    dynamic: bool = False
    choices: tuple[str, ...] = ()
    minimum: int = 0
    opt_in: bool = False

    def parse(self, text: str, op: str) -> AxisValue:
        """The value that `text` spells on this axis; ValueError names the axis, the expected and the actual value."""
        try:
            return self.check(self._convert(text), op)
        except (TypeError, ValueError) as error:
            if isinstance(error, AxisError):
                raise
            raise AxisError(f"{op}: axis {self.name} wants {self.wants()}, got {text!r}") from error

    def _convert(self, text: str) -> AxisValue:
        if self.kind == "int":
            return int(text)
        if self.kind == "float":
            return float(text)
        if self.kind == "bool":
            if text.lower() in ("true", "1", "yes"):
                return True
            if text.lower() in ("false", "0", "no"):
                return False
            raise ValueError(text)
        return text

    def check(self, value: object, op: str) -> AxisValue:
        """`value` in its canonical form; AxisError if this axis does not allow it.

        A dtype may have any of its names or be a torch.dtype; a scheme may be a QuantScheme.
        """
        wrong = AxisError(f"{op}: axis {self.name} wants {self.wants()}, got {value!r}")
        if self.kind == "int":
            if isinstance(value, bool) or not isinstance(value, int) or value < self.minimum:
                raise wrong
            return value
        if self.kind == "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise wrong
            return float(value)
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise wrong
            return value
        if self.kind == "dtype":
            if value in self.choices:
                return str(value)
            try:
                short = canonical_dtype(value)
            except (TypeError, ValueError):
                raise wrong from None
            if short not in (self.choices or DTYPES):
                raise wrong
            return short
        if self.kind == "scheme":
            from gristmill.kernel_registry.scheme import QuantScheme

            try:
                return str(QuantScheme.parse(value))
            except (TypeError, ValueError) as error:
                raise AxisError(f"{op}: axis {self.name}: {error}") from error
        if not isinstance(value, str):
            raise wrong
        if self.kind == "choice" and value not in self.choices:
            raise wrong
        if self.kind == "flags":
            flags = [] if value in ("", "none") else value.split("+")
            if len(set(flags)) != len(flags) or any(flag not in self.choices for flag in flags):
                raise wrong
            return "+".join(sorted(flags, key=self.choices.index)) or "none"
        return value

    def wants(self) -> str:
        """The values that this axis allows, for messages."""
        if self.kind == "int":
            return f"an integer of at least {self.minimum}"
        if self.kind == "float":
            return "a number"
        if self.kind == "bool":
            return "true or false"
        if self.kind == "dtype":
            return "a dtype, one of " + ", ".join(self.choices or DTYPES)
        if self.kind == "flags":
            return "none or a +-joined subset of " + ", ".join(self.choices)
        if self.kind == "scheme":
            return "a quantization scheme name such as bf16, int4_g128 or fp8_block.fp8_g128"
        return "one of " + ", ".join(self.choices)


class AxisError(ValueError):
    """An invalid problem: unknown axis, missing axis, or invalid value."""


@dataclass(frozen=True)
class Problem:
    """One call of an operation, as data: frozen, hashable, printed as ``m=16,n=4096,w=int4_g128``. `Op.problem` makes it.

    Attributes:
        op: the operation's name.
        values: (axis, value) of every axis, in declared order; None = a dynamic axis left open, as in a plan.
        defaults: of the axes, in the same order: values at their default are not printed.
    """

    op: str
    values: tuple[tuple[str, AxisValue | None], ...]
    defaults: tuple[AxisValue | None, ...] = ()

    def __getitem__(self, axis: str) -> AxisValue:
        for name, value in self.values:
            if name == axis:
                if value is None:
                    raise AxisError(f"{self.op}: axis {axis} is open in {self}")
                return value
        raise AxisError(f"{self.op} has no axis {axis}; it has {', '.join(n for n, _ in self.values)}")

    def integer(self, axis: str) -> int:
        """An integer axis."""
        value = self[axis]
        if not isinstance(value, int):
            raise AxisError(f"{self.op}: axis {axis} is {value!r}, not an integer")
        return value

    def integers(self, *axes: str) -> tuple[int, ...]:
        """Several integer axes."""
        return tuple(self.integer(axis) for axis in axes)

    def text(self, axis: str) -> str:
        """A text axis (dtype, scheme, choice, flags)."""
        value = self[axis]
        if not isinstance(value, str):
            raise AxisError(f"{self.op}: axis {axis} is {value!r}, not text")
        return value

    def flags(self, axis: str) -> tuple[str, ...]:
        """The members of a flags axis."""
        text = self.text(axis)
        return () if text == "none" else tuple(text.split("+"))

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The dynamic axes that have no value: () for a concrete call."""
        return tuple(name for name, value in self.values if value is None)

    def with_values(self, **changes: AxisValue | None) -> Problem:
        """The same problem with some axes changed (None opens a dynamic axis). Values are taken as given."""
        unknown = changes.keys() - {name for name, _ in self.values}
        if unknown:
            raise AxisError(f"{self.op} has no axis {', '.join(sorted(unknown))}")
        return Problem(self.op, tuple((n, changes.get(n, v)) for n, v in self.values), self.defaults)

    def as_dict(self) -> dict[str, AxisValue | None]:
        """Axis name -> value, in declared order."""
        return dict(self.values)

    def __iter__(self) -> Iterator[tuple[str, AxisValue | None]]:
        return iter(self.values)

    def __str__(self) -> str:
        defaults = self.defaults or (None,) * len(self.values)
        parts = []
        for (name, value), default in zip(self.values, defaults, strict=True):
            if value is None or (default is not None and value == default):
                continue
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else f"{value:g}"
                if isinstance(value, float)
                else value
            )
            parts.append(f"{name}={text}")
        return ",".join(parts)


def problems(text: str) -> tuple[str, ...]:
    """The texts of several problems, separated by white space."""
    return tuple(text.split())


def make_problem(op: str, axes: tuple[Axis, ...], stated: Mapping[str, object]) -> Problem:
    """A problem from axis values: defaults filled in, dynamic axes left open when absent or None; AxisError otherwise."""
    unknown = stated.keys() - {axis.name for axis in axes}
    if unknown:
        raise AxisError(
            f"{op} has no axis {', '.join(sorted(unknown))}; its axes are {', '.join(a.name for a in axes)}"
        )
    values: list[tuple[str, AxisValue | None]] = []
    missing = []
    for axis in axes:
        value = stated.get(axis.name, axis.default)
        if value is None:
            if not axis.dynamic:
                missing.append(axis.name)
            values.append((axis.name, None))
        else:
            values.append((axis.name, axis.check(value, op)))
    if missing:
        raise AxisError(f"{op}: missing {', '.join(missing)} (axes: {', '.join(a.name for a in axes)})")
    return Problem(op, tuple(values), tuple(axis.default for axis in axes))


def parse_problem(op: str, axes: tuple[Axis, ...], text: str) -> Problem:
    """The problem that ``m=16,n=4096,...`` spells; AxisError names what is wrong with it."""
    by_name = {axis.name: axis for axis in axes}
    stated: dict[str, AxisValue | None] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals:
            raise AxisError(f"{op}: expected axis=value, got {part!r}")
        if name not in by_name:
            raise AxisError(f"{op} has no axis {name}; its axes are {', '.join(by_name)}")
        if name in stated:
            raise AxisError(f"{op}: axis {name} is given twice")
        stated[name] = by_name[name].parse(value.strip(), op)
    return make_problem(op, axes, stated)
