"""The package has no import cycles, including imports inside functions and those for type checkers.

The modules are read, not imported. A package's ``__init__`` may name its modules for type checkers, since its
exports are resolved when they are first used; everything else counts.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gristmill"


def modules() -> dict[str, Path]:
    """Returns every module by its name; the folders under src/gristmill are links."""
    roots = [SOURCE, *(folder for folder in SOURCE.iterdir() if folder.is_dir() and folder.name != "_lib")]
    files = [file for root in roots for file in (root.glob("*.py") if root == SOURCE else root.rglob("*.py"))]
    file_of_module = {}
    for file in files:
        parts = ("gristmill", *file.relative_to(SOURCE).with_suffix("").parts)
        file_of_module[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return file_of_module


def imports(name: str, text: str, package: bool, known: Collection[str]) -> Iterator[str]:
    """Returns the dotted names that a module's text imports: of ``from a import b``, a.b if that is a module,
    else a."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if package and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            above = parts[: len(parts) + package - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = (f"{base}.{alias.name}" for alias in node.names)
            yield from (full if full in known else base for full in names)


def graph(texts: Mapping[str, str], packages: frozenset[str]) -> dict[str, set[str]]:
    """Maps each module to the modules that it imports."""
    return {
        name: {t for t in imports(name, text, name in packages, texts) if t in texts} - {name}
        for name, text in texts.items()
    }


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of two modules or more (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                components.append(sorted(stack[at:]))
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    return components


def test_no_module_imports_itself_by_way_of_others() -> None:
    files = modules()
    assert len(files) > 300 and "gristmill.runtime.models.llama" in files
    packages = frozenset(name for name, file in files.items() if file.name == "__init__.py")
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    assert cycles(graph(texts, packages)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from gristmill.a import thing",
        "import gristmill.a",
        "def f():\n    from gristmill import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gristmill.a import Thing",
        "from . import a",
        "from .a import thing",
    ],
)
def test_a_planted_circle_is_found(line: str) -> None:
    texts = {"gristmill": "", "gristmill.a": "import gristmill.b.c", "gristmill.b": "", "gristmill.b.c": ""}
    assert cycles(graph(texts, frozenset({"gristmill", "gristmill.b"}))) == []
    back = line.replace("from .", "from ..") if line.startswith("from .") else line
    found_cycles = cycles(graph(texts | {"gristmill.b.c": back}, frozenset({"gristmill", "gristmill.b"})))
    assert found_cycles == [["gristmill.a", "gristmill.b.c"]]


def test_a_package_may_name_its_modules_for_type_checkers() -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gristmill.a import Thing"
    packages = frozenset({"gristmill"})
    assert cycles(graph({"gristmill": lazy, "gristmill.a": "from gristmill import version"}, packages)) == []
    eager = "from gristmill.a import Thing"
    assert cycles(graph({"gristmill": eager, "gristmill.a": "from gristmill import version"}, packages))
