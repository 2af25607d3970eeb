"""The calls of every operation: kernels/calls.pyi, a class per operation with the types of its arguments and outputs for type checkers,
and kernels/_native/calls/<op>.h, their structs for C; and the headers of other structs that native entries take."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from gristmill.kernel_registry.call import call_name
from gristmill.kernel_registry.call_struct import header
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import Registry
from gristmill.quant import argument_struct

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "kernels" / "calls.pyi"
HEADERS = STUB.parent / "_native" / "calls"
TYPES = {"Tensor": "Tensor", "Tensor?": "Tensor | None", "Tensor[]": "list[Tensor]"}
"""Type of a torch schema -> the annotation; of other types their name."""


def text(registry: Registry) -> str:
    """The stub. Operations of plugins are left out."""
    ops = [op for name, op in sorted(registry.ops.items()) if name not in registry.plugins]
    head = '"""Written by `make generate` from the registry; do not edit."""\n\nfrom torch import Tensor\n\n'
    return head + "from gristmill.kernel_registry.call import Call\n\n" + "\n".join(map(_class, ops))


def headers(registry: Registry) -> dict[Path, Callable[[], str]]:
    """The headers of the operations that have native kernels -> their texts."""
    native = {kernel.op for kernel in registry.all_kernels() if kernel.language in ("cpp", "cuda", "hip")}
    return {
        HEADERS / f"{op}.h": partial(header, registry.op(op))
        for op in sorted(native - registry.plugins.keys())
    }


def argument_headers() -> dict[Path, Callable[[], str]]:
    """The headers of the structs that launchers fill, each beside the module ``args.py`` that declares them -> their texts."""
    modules = sorted(path for folder in ("kernels", "quant") for path in (ROOT / folder).rglob("args.py"))
    return {path.with_suffix(".h"): partial(_argument_header, path) for path in modules}


def _argument_header(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    values = vars(import_module(f"gristmill.{name}")).values()
    return argument_struct.header(
        [value for value in values if isinstance(value, argument_struct.ArgumentStruct)]
    )


def _class(op: Op) -> str:
    lines = [f"class {call_name(op.name)}(Call):"]
    for parameter in op.parameters:
        kind = re.sub(r"\(.*\)", "", parameter.type)
        lines.append(f"    {parameter.name}: {TYPES.get(kind, kind)}")
    return "\n".join([*lines, *(f"    {name}: Tensor" for name in op.outputs), ""])
