"""Types: mypy is strict for every package, and kernels declare which of their arguments are tensors.

Launchers are read, not imported, so that those of libraries that are not installed are checked too.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.kernel_registry import Kernel, Op, default_registry
from gristmill.kernel_registry.call import call_name

ROOT = Path(__file__).parents[1]
LINKED = (  # links under src/gristmill
    "autotune",
    "bench",
    "integrations",
    "kernel_registry",
    "kernels",
    "quant",
    "runtime",
    "serve",
    "tools",
)
OURS = ("gristmill", "lab", "ci", "examples")
TYPES = {
    "Tensor": {"Tensor", "torch.Tensor"},
    "Tensor?": {"Tensor | None", "torch.Tensor | None"},
    "Tensor[]": {"list[Tensor]", "WeightLike"},
    "int": {"int"},
    "float": {"float"},
    "bool": {"bool"},
    "str": {"str"},
}
MOST = 150
REGISTRY = default_registry()


def unchecked(config: dict[str, Any], files: list[str]) -> list[str]:
    """Returns what prevents `config` ([tool.mypy]) from checking all of `files` strictly."""
    faults = [] if config.get("strict") is True else ["not strict"]
    faults += [
        key
        for key in config
        if key in ("exclude", "ignore_errors") or re.match("allow_|disallow_|disable_", key)
    ]
    for override in config.get("overrides", ()):
        modules = override["module"] if isinstance(override["module"], list) else [override["module"]]
        faults += [
            f"an override of {name}" for name in modules if name.split(".")[0] in OURS or name[0] == "*"
        ]
    for file in files:
        if not any(Path(file).is_relative_to(folder) for folder in config.get("files", ())):
            faults.append(file)
    return faults


def sources() -> list[str]:
    """Returns the Python files of the repository except the tests, by the path under which mypy finds them."""
    folders = [
        folder
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name[0] != "." and not (folder / "pyvenv.cfg").exists()
    ]
    files = [
        file.relative_to(ROOT)
        for folder in folders
        if folder.name not in ("tests", "build", "dist")
        for file in folder.rglob("*.py")
    ]
    return [str("src/gristmill" / file if file.parts[0] in LINKED else file) for file in files]


def settings() -> dict[str, Any]:
    """Returns [tool.mypy] of pyproject.toml."""
    tables: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "mypy"
    ]
    return tables


def test_mypy_checks_every_file_strictly() -> None:
    assert len(sources()) > 300
    assert unchecked(settings(), sources()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"strict": False}, "not strict"),
        ({"disallow_untyped_defs": False}, "disallow_untyped_defs"),
        ({"exclude": ["kernels"]}, "exclude"),
        ({"files": ["src/gristmill", "lab", "ci"]}, "examples/run.py"),
        (
            {"overrides": [{"module": ["scipy.*", "gristmill.kernels.*"], "ignore_errors": True}]},
            "an override of gristmill.kernels.*",
        ),
    ],
)
def test_what_mypy_would_not_check_is_named(change: dict[str, Any], fault: str) -> None:
    assert fault in unchecked({**settings(), **change}, sources())


def test_any_is_rare_in_kernels() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "kernels").rglob("*.py")]
    assert len(texts) > 100
    assert sum(len(re.findall(r"\bAny\b", text)) for text in texts) < MOST


def declared(op: Op) -> list[tuple[str, str]]:
    """Returns (name, type) of the arguments of `op`, as in its schema but without marks of mutation."""
    return [(p.name, re.sub(r"\([a-z]!\)", "", p.type)) for p in op.parameters]


def misfits(op: Op, annotations: list[tuple[str, str]]) -> Iterator[str]:
    """Yields the arguments of `op` whose annotations, in order, differ from its declarations."""
    for (name, kind), (parameter, annotation) in zip(declared(op), annotations, strict=True):
        if annotation not in TYPES[kind]:
            yield f"{parameter}: {annotation}, where {op.name} declares {kind} {name}"


@pytest.mark.parametrize("op", list(REGISTRY.ops.values()), ids=lambda op: op.name)
def test_references_have_the_declared_types(op: Op) -> None:
    shown = inspect.signature(op.reference).parameters.values()
    assert list(misfits(op, [(p.name, str(p.annotation)) for p in shown])) == []


def launcher(kernel: Kernel) -> list[tuple[str, str]]:
    """Returns (name, annotation) of the parameters of a launcher, from its source."""
    module, _, attribute = kernel.target.partition(":")
    path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return [(a.arg, ast.unparse(a.annotation) if a.annotation else "") for a in node.args.args]
    raise LookupError(f"{path} defines no function {attribute}")


@pytest.mark.parametrize("kernel", list(REGISTRY.all_kernels()), ids=lambda kernel: kernel.name)
def test_launchers_have_the_declared_types(kernel: Kernel) -> None:
    assert launcher(kernel)[:2] == [("config", "Config"), ("call", call_name(kernel.op))]


def test_a_wrong_annotation_is_named() -> None:
    op = REGISTRY.op("sample")
    right = [(name, "Tensor | None" if kind == "Tensor?" else "Tensor") for name, kind in declared(op)]
    assert list(misfits(op, right)) == []
    wrong = [("workspace", "Any") if name == "workspace" else (name, kind) for name, kind in right]
    assert list(misfits(op, wrong)) == ["workspace: Any, where sample declares Tensor? workspace"]
