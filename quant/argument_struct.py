"""Structs of arguments that the callers of native entries compute (the calls of operations are `kernel_registry.call_struct`).

A struct is declared once, as the text of its fields in C, in a module ``args.py``; `make generate` writes the header ``args.h`` beside it:

    ARGS = ArgumentStruct("GmScaleArgs", "The arguments of gm_scale.", '''
        int32_t device;   // ordinal
        const float* x;   // [n]
        int32_t n;
    ''')
    args = ARGS.new(device=0, x=x.data_ptr(), n=7)

The header has a digest of the fields. `GM_CPU_ARGS`, `GM_CUDA_ARGS` and `GM_HIP_ARGS` compile it into the library, and it is compared with
the declaration when an entry is first looked up.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import textwrap
from ctypes import Structure, c_uint64
from functools import cached_property

_TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
    "const char*": ctypes.c_char_p,
}
"""C type -> that of ctypes; of other pointers c_void_p."""
_FIELDS = re.compile(r"(?P<type>(?:const )?\w+\*?)\s+(?P<names>\w+(?:,\s*\w+)*);")


class NativeLibraryError(RuntimeError):
    """A native library, or a function in it, is not in this installation."""


class ArgumentStruct:
    """A struct: the name of its type in C, what it is, and the declarations of its fields, with comments.

    Types are int32_t, int64_t, uint32_t, float and pointers. Pointers that are not set are null, numbers 0.
    """

    def __init__(self, name: str, summary: str, declarations: str) -> None:
        self.name, self.summary = name, summary
        self.declarations = textwrap.dedent(declarations).strip("\n")

    @cached_property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """(C type, name) of each field. ValueError for a declaration that is none of those."""
        found, code = [], re.sub(r"//[^\n]*", "", self.declarations)
        for statement in filter(None, (" ".join(part.split()) for part in code.split(";"))):
            match = _FIELDS.fullmatch(statement + ";")
            if match is None or not (match["type"].endswith("*") or match["type"] in _TYPES):
                raise ValueError(f"{self.name}: cannot read the declaration {statement!r}")
            found += [(match["type"], name) for name in re.split(r",\s*", match["names"])]
        return tuple(found)

    @cached_property
    def new(self) -> type[Structure]:
        """``new(**fields)``: a ctypes structure. A name that is no field is an error."""
        fields = [(name, _TYPES.get(kind, ctypes.c_void_p)) for kind, name in self.fields]
        return type(self.name, (Structure,), {"__slots__": (), "_fields_": fields})

    @cached_property
    def digest(self) -> int:
        """A number of 63 bits that differs for different fields."""
        text = ";".join(f"{kind} {name}" for kind, name in self.fields)
        return int.from_bytes(hashlib.sha256(f"{self.name}:{text}".encode()).digest()[:8]) >> 1

    def definition(self) -> str:
        """The struct in C++; a comment stands above its field."""
        lines = [*_comment(self.summary, ""), f"struct {self.name} {{"]
        lines.append(f"  static constexpr uint64_t kDigest = {self.digest:#x};")
        for line in self.declarations.splitlines():
            field, _, comment = line.partition("//")
            lines += [*_comment(comment.strip(), "  "), *([f"  {field.strip()}"] if field.strip() else [])]
            lines += [] if line.strip() else [""]
        return "\n".join([*lines, "};"])


def _comment(text: str, indent: str) -> list[str]:
    return (
        textwrap.wrap(text, 108, initial_indent=f"{indent}// ", subsequent_indent=f"{indent}// ")
        if text
        else []
    )


def header(structs: list[ArgumentStruct]) -> str:
    """The text of the header of a module's structs."""
    lines = [
        "// Written by `make generate` from args.py, which declares these structs; do not edit.",
        "#pragma once",
    ]
    return "\n".join([*lines, "#include <cstdint>", "", *(f"{struct.definition()}\n" for struct in structs)])


def check_struct(library: ctypes.CDLL, name: str, struct: ArgumentStruct) -> None:
    """NativeLibraryError if an entry of a library was compiled with another struct."""
    try:
        compiled = library[f"args_of_{name}"]
    except AttributeError:
        raise NativeLibraryError(
            f"{name} of {library._name} takes no {struct.name}; run `make build`"
        ) from None
    compiled.restype = c_uint64
    if compiled() != struct.digest:
        raise NativeLibraryError(
            f"{library._name} was built from another declaration of {struct.name}, which {name} takes, than this Python code has; "
            "run `make generate build`"
        )
