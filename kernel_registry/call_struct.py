"""The C struct of a call: what native kernels get of `Op.Call`, from the same declaration.

Every field has eight bytes: a pointer, an int64 or a double. Python packs them in order, and C reads them without padding. ``header(op)`` is
the text of kernels/_native/calls/<op>.h, which `make generate` writes; ``packer(op)`` makes the function from a call to the bytes of its
struct. Both follow from the same list of fields, and `digest` of that list is compiled into each library: a library that was built from
another declaration is refused when an entry is first looked up (`gristmill.kernels.native`).

The fields, for each argument and then for each output, in order:

- a tensor: its address (null for None) and, unless it is contiguous, ``<name>_stride``: the strides in elements of all dimensions but a
  contiguous last one; of ``rows`` and ``matrix`` the one between rows. 0 for None.
- packed weights: ``<name>[WEIGHTS]``, the addresses of their tensors, ``<name>_size``, their numbers of elements (-1 unless contiguous), and
  ``<name>_type``, their dtype codes (-1 for one that there is not).
- scratch memory: ``workspace`` and ``workspace_bytes``.
- a number or a flag: its value; of a size that was not stated, what the output says.
- a string that chooses from an axis: an enumerator of an enum class of the choices. Other strings stay in Python.

Then the sizes that shapes determine, by their names (0 where the argument is None; ``<name>_count`` for one that shares its name with an
argument), and ``<axis>_type``, the dtype codes of dtype axes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Any

from gristmill.kernel_registry.argument_names import Shape, is_name
from gristmill.kernel_registry.arguments import (
    CONTIGUOUS,
    STRIDED,
    VECTORS,
    Declared,
    Scalar,
    Tensor,
    Weight,
    WorkspaceArgument,
)
from gristmill.kernel_registry.call import call_name

WEIGHTS = 6
"""The most tensors of a packed weight."""


@dataclass(frozen=True)
class Field:
    """A field: its C type and name, how many values it has, the Python source of them, a comment, and what its enum class lists."""

    type: str
    name: str
    count: int
    source: str
    comment: str = ""
    choices: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The format characters of `struct`."""
        return ("P" if self.type.endswith("*") else "d" if self.type == "double" else "q") * self.count

    @property
    def declaration(self) -> str:
        """The type and name in C."""
        listed = (
            f"enum class {self.type} : int64_t {{ {', '.join(self.choices)} }} "
            if self.choices
            else f"{self.type} "
        )
        return f"{listed}{self.name}" + (
            f"[{self.count}]" if self.count > 1 or self.name.endswith("_stride") else ""
        )


def fields(op: Declared) -> tuple[Field, ...]:
    """The fields of the struct of an operation's calls."""
    found: list[Field] = []
    for item in (*op.arguments, *op.returns):
        if isinstance(item, Tensor):
            found += _tensor(op, item)
        elif isinstance(item, Weight):
            found += _weight(item)
        elif isinstance(item, WorkspaceArgument):
            found.append(
                Field("void*", item.name, 1, "0 if call.workspace is None else call.workspace.data_ptr()")
            )
            found.append(
                Field(
                    "int64_t", "workspace_bytes", 1, "0 if call.workspace is None else call.workspace.nbytes"
                )
            )
        elif item.kind == "str":
            choices = next((axis.choices for axis in op.axes if axis.name == item.name), ())
            numbers = {choice: number for number, choice in enumerate(choices)}
            found += (
                [Field(item.name.capitalize(), item.name, 1, f"{numbers}[call.{item.name}]", choices=choices)]
                if choices
                else []
            )
        else:
            kind = "double" if item.kind == "float" else "int64_t"
            found.append(Field(kind, item.name, 1, f"call.{item.name}{_unstated(op, item)}"))
    return (*found, *_named_sizes(op), *_dtypes(op))


def _unstated(op: Declared, item: Scalar) -> str:
    """`` or <the size>`` for a number that repeats a size, 0 where it is not stated, if an output has a dimension ``size//(expression)``."""
    for tensor in op.returns if item.states else ():
        for place, size in Shape(tensor.shape).places():
            name, _, divisor = size.partition("//")
            if name == item.states and divisor:
                factor = re.sub(r"[a-z_]\w*", r"call.\g<0>", divisor)
                return f" or call.{tensor.name}.shape[{place}] * {factor}"
    return ""


def _weight(item: Weight) -> Iterator[Field]:
    tensors = f"call.{item.name}"
    yield Field("const void*", item.name, WEIGHTS, f"*addresses({tensors})", f"of [{_sizes(item.shape)}]")
    yield Field("int64_t", f"{item.name}_size", WEIGHTS, f"*element_counts({tensors})")
    yield Field("int64_t", f"{item.name}_type", WEIGHTS, f"*weight_types({tensors})")


def _sizes(shape: str) -> str:
    return shape.replace(" ", ", ")


def _tensor(op: Declared, item: Tensor) -> Iterator[Field]:
    x, absent = f"call.{item.name}", f"0 if call.{item.name} is None else " if item.optional else ""
    written = item.mutable or item in op.returns
    yield Field(
        "void*" if written else "const void*",
        item.name,
        1,
        f"{absent}{x}.data_ptr()",
        f"[{_sizes(item.shape)}]",
    )
    shape = Shape(item.shape)
    if item.strides == CONTIGUOUS or shape.flat:
        return
    if item.strides in (VECTORS, STRIDED) and not shape.leading:
        count = len(shape.sizes) - (item.strides == VECTORS)
        if count:
            nothing = f"({'0, ' * count}) if {x} is None else " if item.optional else ""
            yield Field("int64_t", f"{item.name}_stride", count, f"*({nothing}{x}.stride()[:{count}])")
    else:
        yield Field("int64_t", f"{item.name}_stride", 1, f"{absent}row_stride({x})", "between rows")


def _named_sizes(op: Declared) -> Iterator[Field]:
    scalars = {a.name for a in op.arguments if isinstance(a, Scalar)}
    taken = set(scalars)
    tensors = [a for a in (*op.arguments, *op.returns) if isinstance(a, Tensor)]
    named = {tensor.name for tensor in tensors}
    for item in sorted(tensors, key=lambda tensor: tensor.optional):
        shape, x = Shape(item.shape), f"call.{item.name}"
        absent = f"0 if {x} is None else " if item.optional else ""
        if shape.leading and op.bucket is not None and op.bucket not in taken:
            taken.add(op.bucket)
            inner = " * ".join(f"{x}.shape[{-place - 1}]" for place in range(len(shape.sizes)))
            yield Field(
                "int64_t", op.bucket, 1, f"{absent}{x}.numel() // max(1, {inner})", f"rows of {item.name}"
            )
        for place, size in shape.places():
            name, _, more = size.partition("+")  # seqs+1, as starts of sequences have
            if name in scalars and is_name(more):  # latent_dim+rope_dim
                name, more = more, f"call.{name}"
            if (
                is_name(name)
                and name not in taken
                and (not more or more.isdigit() or more.startswith("call."))
            ):
                taken.add(name)
                less = f" - {more}" if more else ""
                field = f"{name}_count" if name in named else name
                yield Field("int64_t", field, 1, f"{absent}{x}.shape[{place}]{less}")


def _dtypes(op: Declared) -> Iterator[Field]:
    tensors = [a for a in (*op.arguments, *op.returns) if isinstance(a, Tensor)]
    for axis in op.axes:
        owner = next((t for t in tensors if t.dtype == axis.name and not t.optional), None)
        if axis.kind == "dtype" and owner is not None:
            yield Field(
                "int64_t", f"{axis.name}_type", 1, f"dtype_code(call.{owner.name}.dtype)", f"of {owner.name}"
            )


def digest(op: Declared) -> int:
    """A number of 63 bits that differs for different fields."""
    text = ";".join(
        f"{field.type}{list(field.choices) or ''} {field.name}[{field.count}]" for field in fields(op)
    )
    return int.from_bytes(hashlib.sha256(f"{op.name}:{text}".encode()).digest()[:8]) >> 1


def header(op: Declared) -> str:
    """The text of the struct's header."""
    lines = [
        f"// The arguments and outputs of {op.name}, as its native kernels get them. Written by `make generate` from the",
        "// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.",
        "#pragma once",
        "#include <cstdint>",
        "",
        f"struct Gm{call_name(op.name)} {{",
        f"  static constexpr uint64_t kDigest = {digest(op):#x};",
    ]
    for field in fields(op):
        lines += [f"  // {field.comment}"] if field.comment else []
        lines.append(f"  {field.declaration};")
    return "\n".join([*lines, "};", ""])


def packer(op: Declared, names: dict[str, Any]) -> Callable[[Any], bytes]:
    """``pack(call)``: the bytes of the struct. names: the functions that the sources of fields use: ``dtype_code``, ``row_stride``,
    ``addresses``, ``element_counts`` and ``weight_types``."""
    layout = Struct("".join(field.code for field in fields(op)))
    values = ",\n        ".join(field.source for field in fields(op))
    scope: dict[str, Any] = {"pack_into": layout.pack, **names}
    exec(
        compile(
            f"def pack(call):\n    return pack_into(\n        {values},\n    )\n",
            f"<gristmill call of {op.name}>",
            "exec",
        ),
        scope,
    )
    pack: Callable[[Any], bytes] = scope["pack"]
    return pack
