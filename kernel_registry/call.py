"""The call of an operation: its arguments and outputs, as attributes of their declared names.

What an operation takes is declared once (`arguments`). Launchers, guards, verification and benchmarks get a call, so that an argument
that one of them does not read passes it without a line of code. ``kernels/calls.pyi`` has the types of the attributes, for type checkers.
"""

from __future__ import annotations

import ast
from dataclasses import field, make_dataclass
from operator import attrgetter
from typing import Any, ClassVar, Self

from gristmill.kernel_registry.arguments import Declared


class Call:
    """One call of an operation. ``op.Call(*arguments, *outputs)`` makes it, by position or by name.

    Attributes:
        names: the names of the arguments, then of the outputs.
        count: the number of arguments.
    """

    __slots__ = ()
    names: ClassVar[tuple[str, ...]] = ()
    count: ClassVar[int] = 0

    def values(self) -> tuple[Any, ...]:
        """The arguments, then the outputs."""
        return tuple(getattr(self, name) for name in self.names)

    def arguments(self) -> tuple[Any, ...]:
        """The arguments in the order of the reference's parameters."""
        return self.values()[: self.count]

    def replace(self, **changes: Any) -> Self:
        """The same call with other values for some names."""
        return type(self)(**(dict(zip(self.names, self.values(), strict=True)) | changes))


def call_name(op: str) -> str:
    """The name of the class of an operation's calls: ``rms_norm`` -> ``RmsNormCall``."""
    return "".join(part.capitalize() for part in op.split("_")) + "Call"


def call_class(op: Declared) -> Any:
    """The class of the calls of an operation: a slot for each argument and output. Outputs that are not given are None."""
    names = (*(parameter.name for parameter in op.parameters), *op.outputs)
    given = [
        (
            parameter.name,
            Any,
            *([] if parameter.default is None else [field(default=ast.literal_eval(parameter.default))]),
        )
        for parameter in op.parameters
    ]
    outputs = [(name, Any, field(default=None)) for name in op.outputs]
    getter = attrgetter(*names)
    values = getter if len(names) > 1 else lambda call: (getter(call),)
    return make_dataclass(
        call_name(op.name),
        [*given, *outputs],
        bases=(Call,),
        namespace={"names": names, "count": len(op.parameters), "values": lambda self: values(self)},
        slots=True,
        eq=False,
    )
