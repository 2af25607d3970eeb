"""The functions of an operation that its declared arguments make: their source, put together and compiled once."""

from __future__ import annotations

import linecache
from math import isfinite, prod
from typing import Any
from zlib import crc32

from gristmill.kernel_registry import argument_checks
from gristmill.kernel_registry.argument_names import Names
from gristmill.kernel_registry.argument_source import describe_source
from gristmill.kernel_registry.arguments import Declared, Tensor
from gristmill.kernel_registry.dtypes import TORCH_NAMES
from gristmill.kernel_registry.guard_source import guard_source, like_source


def compiled(op: Declared) -> dict[str, Any]:
    """The functions ``describe``, ``like`` and ``make_guard`` of an operation, and their text as ``source``."""
    dtypes = {item.dtype for item in (*op.arguments, *op.returns) if isinstance(item, Tensor)}
    head = ["import torch", "", f"where = {op.name!r}"]
    for axis in op.axes:
        if axis.kind == "dtype":
            choices = axis.choices or TORCH_NAMES
            choice = ", ".join(f"{name!r}: torch.{TORCH_NAMES[name]}" for name in choices)
            head += [f"dtypes_{axis.name} = {{{choice}}}"]
            head += [f"names_{axis.name} = {{dtype: name for name, dtype in dtypes_{axis.name}.items()}}"]
    head += [f"d_{name} = torch.{TORCH_NAMES[name]}" for name in sorted(dtypes.intersection(TORCH_NAMES))]
    gap = ["", ""]
    source = "\n".join(
        [*head, *gap, *describe_source(op), *gap, *like_source(op), *gap, *guard_source(op), ""]
    )
    scope: dict[str, Any] = {
        name: value for name, value in vars(argument_checks).items() if not name.startswith("_")
    }
    scope |= {"prod": prod, "isfinite": isfinite, "source": source}
    scope |= {f"rule_{index}": rule for index, rule in enumerate(op.rules)}
    taken = {"torch", "where", "values", "problem", "lead", "wrong", *scope} & {
        *Names(op).arguments,
        *op.outputs,
    }
    if taken:
        raise ValueError(
            f"{op.name}: {', '.join(sorted(taken))}: the generated checks use this name; choose another"
        )
    file = f"<gristmill {op.name} {crc32(source.encode()):08x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return scope
