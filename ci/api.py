"""The reference of the public interface, docs/api.md, and the stub of gristmill.ops, src/gristmill/ops.pyi. `generate.py` writes them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gristmill
from gristmill.autotune.operators import EVERY_OPERATION, binder, meaning
from gristmill.kernel_registry import DTYPES, default_registry
from gristmill.kernel_registry.dtypes import ALIASES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
STUB = ROOT / "src" / "gristmill" / "ops.pyi"
WIDTH = 110
PROSE_WIDTH = 140
"""Line length of docstrings in the stub; shorter lines are not rewrapped."""

SECTIONS = {
    "Kernels": ("gristmill.ops", "gristmill.autotune", "gristmill.kernel_registry"),
    "Quantized weights": ("gristmill.quant", "gristmill.kernels", "gristmill.kernel_registry.scheme"),
    "Modules": ("gristmill.nn",),
    "Runtime": ("gristmill.runtime", "gristmill.tools"),
    "Errors": (),
}
"""Sections of the page -> packages and modules whose public names they have; the last one has the exceptions of all."""

MADE_BY_USERS = ("SamplingParams", "Speculation", "KVTransfer", "Policy")
"""Dataclasses that users construct: their constructor is shown. Of other dataclasses, which functions return, the fields are shown."""

OPS_HELPERS = ("bind", "layouts", "prepare", "release", "resolver", "seal")

HEAD = """# Public interface

Written by `python ci/generate.py` from signatures and docstrings; do not edit. `import gristmill` offers every name of this page
and imports neither torch nor a kernel before one is used. Shapes are in square brackets, `...` stands for any leading
dimensions; times are microseconds, sizes bytes, unless said otherwise.

## Names of dtypes

A dtype goes by any of these names, in upper or lower case, with or without `torch.`, and as the torch.dtype: in problems, in
`LLM(dtype=...)`, in `quantize` and on the command lines. The first is what gristmill stores and prints.
"""


def _annotation(annotation: Any) -> str:
    """An annotation as the source has it, without the modules of common types."""
    return _short(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def parameter_lines(signature: inspect.Signature) -> list[str]:
    """The parameters, each as a line of a definition."""
    lines = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        stars = "*" * ((p.kind is p.VAR_POSITIONAL) + 2 * (p.kind is p.VAR_KEYWORD))
        default = "" if p.default is p.empty else f" = {_short(repr(p.default))}"
        lines.append(f"    {stars}{p.name}: {_annotation(p.annotation)}{default},")
    return lines


def returned(signature: inspect.Signature) -> str:
    """`` -> ...``, or nothing."""
    annotation = signature.return_annotation
    return "" if annotation is signature.empty else f" -> {_annotation(annotation)}"


def signature_text(name: str, signature: inspect.Signature) -> str:
    """``name(...) -> ...``, with one parameter per line if it exceeds a line."""
    lines = parameter_lines(signature)
    text = f"{name}({', '.join(line.strip(' ,') for line in lines)}){returned(signature)}"
    return text if len(text) <= WIDTH else "\n".join([f"{name}(", *lines, f"){returned(signature)}"])


def _short(text: str) -> str:
    """`text` without the modules of common types."""
    return re.sub(r"\b(torch|collections\.abc|gristmill(\.\w+)*)\.(?=[A-Z])", "", text).replace(
        "<factory>", "..."
    )


def markdown(text: str | None) -> str:
    """A docstring as Markdown: paragraphs stay; ``name: meaning`` lines, under ``Args:`` and the like or alone, become lists."""
    out: list[str] = []
    indent = 0  # of list items: 4 under a heading
    for line in inspect.cleandoc(text or "").splitlines():
        if re.fullmatch(r"[A-Z][\w ]*:", line):
            indent = 4
            out += ["", line, ""]
            continue
        if line[:1].strip():
            indent = 0
        depth, line = len(line) - len(line.lstrip()), line.strip()
        item = re.match(r"([\w.*]+(?:(?:, | / )[\w.*]+)*): (.*)", line)
        if depth == indent and item and not item[1][0].isdigit():
            out.append(f"- `{item[1]}`: {item[2]}")
        elif depth == indent == 4:
            out.append(f"- {line}")
        else:
            out.append("  " * (depth > indent) + line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).replace("``", "`").strip()


def members(cls: type) -> Iterator[tuple[str, str | None]]:
    """(signature, docstring) of the public methods and properties of a class and its bases here, in their order."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("gristmill.")]
    for name, value in (item for base in bases for item in vars(base).items()):
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(value, property):
            of = inspect.signature(value.fget).return_annotation if value.fget else ""
            yield f"{name}: {_annotation(of)}", value.__doc__
        elif isinstance(value, staticmethod | classmethod):
            # Of a class method the signature as it is called, without the class.
            signature = inspect.signature(getattr(cls, name))
            yield signature_text(f"{cls.__name__}.{name}", signature), value.__doc__
        elif inspect.isfunction(value):
            signature = inspect.signature(value)
            own = [p for p in signature.parameters.values() if p.name != "self"]
            yield signature_text(name, signature.replace(parameters=own)), value.__doc__


def fenced(text: str) -> str:
    """A code block of Markdown."""
    return f"```\n{text}\n```"


def class_section(name: str, cls: type) -> list[str]:
    """A class: its constructor, its docstring, its members."""
    lines = [f"### {name}", ""]
    if issubclass(cls, enum.Enum):
        lines += [markdown(cls.__doc__), "", ", ".join(f"`{m.name}` (`{m.value}`)" for m in cls), ""]
        return lines
    if issubclass(cls, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        return [*lines, f"A kind of {bases}. {markdown(cls.__doc__)}", ""]
    shown = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) and name not in MADE_BY_USERS else None
    if "__init__" in vars(cls) and shown is None:
        constructor = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
        lines += [fenced(signature_text(name, constructor)), ""]
    lines += [markdown(cls.__doc__), ""]
    if shown is not None:
        fields = "\n".join(f"{f.name}: {_short(str(f.type))}" for f in shown if f.name[0] != "_")
        lines += ["Fields:", "", fenced(fields), ""]
    for text, doc in members(cls):
        lines += [fenced(text), "", markdown(doc), ""]
    return lines


def function_section(
    name: str, signature: inspect.Signature, doc: str | None, level: str = "###"
) -> list[str]:
    """A function: signature and docstring."""
    return [f"{level} {name}", "", fenced(signature_text(name, signature)), "", markdown(doc), ""]


def helpers() -> dict[str, Callable[..., Any]]:
    """The functions of gristmill.ops that are no operations."""
    return {name: getattr(gristmill.ops, name) for name in OPS_HELPERS}


def ops_section() -> list[str]:
    """gristmill.ops: its docstring, its helpers, its operations."""
    lines = ["### ops", "", markdown(gristmill.ops.__doc__), ""]
    for name, helper in helpers().items():
        lines += function_section(f"ops.{name}", inspect.signature(helper), helper.__doc__, "####")
    lines += ["#### Operations", "", markdown(EVERY_OPERATION), ""]
    for name, op in sorted(default_registry().ops.items()):
        lines += function_section(f"ops.{name}", inspect.signature(binder(op)), meaning(op), "####")
    return lines


def section(value: Any) -> str:
    """The section of a public name: that of the innermost package in SECTIONS that defines it."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return "Errors"
    module = value.__name__ if inspect.ismodule(value) else value.__module__
    homes = {
        home: title for title, of in SECTIONS.items() for home in of if f"{module}.".startswith(f"{home}.")
    }
    return homes[max(homes, key=len)]


def page() -> str:
    """docs/api.md."""
    values = {name: getattr(gristmill, name) for name in vars(gristmill)["__all__"]}
    lines = [HEAD, "| stored and printed | also |", "|---|---|"]
    for dtype in DTYPES:
        aliases = [name for name, short in ALIASES.items() if short == dtype and name != dtype]
        lines.append(f"| `{dtype}` | {', '.join(f'`{name}`' for name in aliases)} |")
    for title in SECTIONS:
        lines += ["", f"## {title}", ""]
        for name, value in values.items():
            if section(value) != title:
                continue
            if name == "ops":
                lines += ops_section()
            elif name == "nn":
                lines += ["### nn", "", markdown(gristmill.nn.__doc__), ""]
                for module in (gristmill.nn.Linear, gristmill.nn.Embedding, gristmill.nn.RMSNorm):
                    lines += class_section(f"nn.{module.__name__}", module)
            elif inspect.isclass(value):
                lines += class_section(name, value)
            else:
                lines += function_section(name, inspect.signature(value), value.__doc__)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def stub_function(name: str, signature: inspect.Signature, doc: str | None) -> str:
    """One function of the stub in the layout of the formatter: one parameter per line."""
    parameters = [line.replace("'", '"') for line in parameter_lines(signature)]
    lines = [f"def {name}(", *parameters, f"){returned(signature)}:"]
    body = []
    for line in inspect.cleandoc(doc or "").splitlines():
        indent = len(line) - len(line.lstrip())
        body += textwrap.wrap(line, PROSE_WIDTH, subsequent_indent=" " * (indent + 4 if indent else 0)) or [
            ""
        ]
    quoted = "\n".join(f"    {line}".rstrip() for line in body)
    lines.append(f'    """{quoted.strip()}' + ('\n    """' if len(body) > 1 else '"""'))
    return "\n".join(lines)


def stub() -> str:
    """src/gristmill/ops.pyi."""
    head = (
        '"""Written by `python ci/generate.py` from the registry; do not edit."""\n\n'
        "from collections.abc import Collection, Iterable, Mapping, Sequence\n\n"
        "import torch\n"
        "from torch import Tensor\n\n"
        "from gristmill.autotune.bound import BoundPlan\n"
        "from gristmill.autotune.resolve import Resolver\n"
        "from gristmill.kernel_registry.policy import Policy\n"
        "from gristmill.kernel_registry.problem import Problem\n"
    )
    parts = [stub_function(name, inspect.signature(made), made.__doc__) for name, made in helpers().items()]
    for name, op in sorted(default_registry().ops.items()):
        parts.append(
            stub_function(name, inspect.signature(binder(op)), f"{meaning(op)}\n\n{EVERY_OPERATION}")
        )
    return head + "\n" + "\n\n".join(parts) + "\n"
