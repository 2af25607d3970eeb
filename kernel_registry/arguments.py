"""Declarations of an operation's arguments: their shapes, dtypes and strides.

The torch schema of the operator is generated from them, as are `describe`, `like` and the guards of plans (see `argument_functions`).

A shape is a string of sizes, one per dimension: ``"blocks block_size kv_heads head_dim"``. A size is an axis of the operation,
another name that ties arguments to each other (``blocks``), a number, or an expression of those without spaces (``2*n``,
``seqs+1``, ``n//(1+silu_mul)``; the names in the last must be determined by other arguments). ``...``, in front, stands for any leading dimensions:
their product is the operation's bucket axis, and they are the same for every argument that has them. A shape in brackets,
``"(m*top_k)"``, is a number of elements in any shape. A size that only an absent optional argument would determine is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gristmill.kernel_registry.problem import Axis

CONTIGUOUS = "contiguous"
VECTORS = "vectors"
ROWS = "rows"
MATRIX = "matrix"
STRIDED = "strided"
STRIDES = {
    CONTIGUOUS: "contiguous",
    VECTORS: "contiguous in its last dimension",
    ROWS: "rows of one stride, contiguous in the last dimension",
    MATRIX: "contiguous, or at most two-dimensional with a contiguous last dimension",
    STRIDED: "of any strides",
}
"""Constraints on the strides of a tensor, as messages print them."""


@dataclass(frozen=True)
class Tensor:
    """A tensor argument, or an output.

    Attributes:
        dtype: the name of a dtype, or an axis of kind ``dtype``: all tensors of that axis share one of its choices. "" = what the rules
            of the operation allow.
        optional: None is allowed, and is the default unless `required`. An axis of kind ``bool`` with the argument's name says whether it
            is given; so does a ``flags`` axis that has the name among its choices.
        mutable: written in place. No two elements of such a tensor may share memory.
        derived: it follows from other arguments, and spares the kernels that read it (`Kernel.reads`) the work of deriving it. Others pass it on
            unread, so a call may give it to any kernel. Optional, without an axis: selection does not depend on it.
        strides: one of `STRIDES`.
    """

    name: str
    shape: str
    dtype: str = "x"
    optional: bool = False
    required: bool = False
    mutable: bool = False
    derived: bool = False
    strides: str = CONTIGUOUS


@dataclass(frozen=True)
class Scalar:
    """A number, a flag or a string. It is the value of the axis of its name, unless a shape determines that axis.

    Attributes:
        kind: ``int``, ``float``, ``bool`` or ``str``.
        default: None = required.
        minimum, maximum, finite: checked where a call is described; `maximum` may be an expression of sizes.
        states: the size that it repeats, 0 = not stated: packed weights may not determine their number of rows.
    """

    name: str
    kind: str
    default: int | float | bool | str | None = None
    minimum: float | None = None
    maximum: int | str | None = None
    finite: bool = False
    states: str = ""


@dataclass(frozen=True)
class Weight:
    """A packed weight, ``Tensor[]`` in the schema: a QuantTensor or a list of one dense tensor for `describe`, the
    tensors of a layout for planned calls.

    Attributes:
        shape: sizes of the weight itself, ``"n k"``, or ``"e n k"`` of one per expert.
        scheme: the axis of its scheme.
        act_order: the axis that says whether the columns of its groups are in any order.
    """

    optional: ClassVar[bool] = False
    name: str
    shape: str
    scheme: str = "w"
    act_order: str = "act_order"


@dataclass(frozen=True)
class WorkspaceArgument:
    """The workspace of the kernel that will run. The kernel checks its size, which only it knows."""

    name: ClassVar[str] = "workspace"


Argument = Tensor | Scalar | Weight | WorkspaceArgument


@dataclass(frozen=True)
class Parameter:
    """One argument of an operation: torch schema type, name, default text (None = required), written in place or not."""

    type: str
    name: str
    default: str | None
    mutable: bool

    @property
    def python(self) -> str:
        """The name with the default, as in the signature of a Python function."""
        return self.name if self.default is None else f"{self.name}={self.default}"

    def __str__(self) -> str:
        return f"{self.type} {self.python}"


class Declared(Protocol):
    """The fields of an `Op` that determine the generated source."""

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> tuple[Axis, ...]: ...
    @property
    def arguments(self) -> tuple[Argument, ...]: ...
    @property
    def returns(self) -> tuple[Tensor, ...]: ...
    @property
    def values(self) -> Mapping[str, str]: ...
    @property
    def rules(self) -> tuple[Callable[..., str | None], ...]: ...
    @property
    def bucket(self) -> str | None: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...


def parameters(arguments: tuple[Argument, ...]) -> tuple[Parameter, ...]:
    """The arguments in torch schema syntax; those written in place are ``(a!)``, ``(b!)``, ..., a workspace ``(w!)``."""
    collected, letters = [], iter("abcdefgh")
    for argument in arguments:
        if isinstance(argument, WorkspaceArgument):
            collected.append(Parameter("Tensor(w!)?", argument.name, "None", True))
        elif isinstance(argument, Weight):
            collected.append(Parameter("Tensor[]", argument.name, None, False))
        elif isinstance(argument, Scalar):
            default = None if argument.default is None else repr(argument.default)
            collected.append(Parameter(argument.kind, argument.name, default, False))
        else:
            alias = f"({next(letters)}!)" if argument.mutable else ""
            default = "None" if argument.optional and not argument.required else None
            kind = f"Tensor{alias}{'?' if argument.optional else ''}"
            collected.append(Parameter(kind, argument.name, default, argument.mutable))
    return tuple(collected)
