"""What a kernel runs, held against what Python and a C++ compiler make of the same files: every kernel, every file."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from gristmill.kernel_registry import closure, native_sources
from gristmill.kernel_registry.closure import Sources, entry_pattern, read_file, read_module
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.native_sources import fits
from gristmill.kernel_registry.registry import default_registry

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "gristmill"
KERNELS = tuple(default_registry().all_kernels())
CALLS = ("cpu_function", "cuda_function", "best_config", "best_level")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ says what a source includes")


def modules_of(kernel: Kernel) -> tuple[str, str]:
    return kernel.module, kernel.target.partition(":")[0]


def names(*patterns: str) -> list[str]:
    """Files by pattern, as names within the package."""
    actual = (path for pattern in patterns for path in PACKAGE.glob(pattern))
    return sorted({str(path.relative_to(PACKAGE)) for path in actual})


PYTHON = names("kernels/**/*.py", "quant/**/*.py", "kernel_registry/*.py")
NATIVE = names(*(f"kernels/**/*.{end}" for end in ("cpp", "cu", "cu.in", "h", "cuh", "json")))


# An oracle that shares nothing with the code under test: ast and imports for Python, g++ for includes.


def runs(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that may run: not what is under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from (other, *runs(other))
            continue
        yield child
        yield from runs(child)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_bytes())


def file_of(module: str) -> str | None:
    """The file of a module, by its name within the package."""
    if not module.startswith("gristmill."):
        return None
    stem = module.removeprefix("gristmill.").replace(".", "/")
    return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if (PACKAGE / name).is_file()), None)


@cache
def imported(name: str) -> frozenset[str]:
    """Files that the imports of a file run, itself apart. A name that is no module is asked for, to see where it is from."""
    found: set[str | None] = set()
    package = "gristmill." + str(Path(name).parent).replace("/", ".")
    for node in runs(tree(name)):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            if not base.startswith("gristmill"):
                continue
            for alias in node.names:
                module = file_of(f"{base}.{alias.name}")
                found.add(module or file_of(base))
                if module is None and (file_of(base) or "").endswith("__init__.py"):
                    home = getattr(importlib.import_module(base), alias.name).__module__
                    found.add(file_of(home))
    return frozenset(one for one in found if one is not None and counted(one))


def counted(name: str) -> bool:
    registry = ("kernel_registry/scheme.py", "kernel_registry/dtypes.py")
    return name.startswith(("kernels/", "quant/")) or name in registry


@cache
def python_reach(modules: tuple[str, ...]) -> frozenset[str]:
    found: set[str] = set()
    waiting = [name for name in map(file_of, modules) if name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += imported(name)
        for folder in Path(name).parents:
            if (PACKAGE / folder / "__init__.py").is_file() and counted(f"{folder}/__init__.py"):
                waiting.append(f"{folder}/__init__.py")
    return frozenset(found)


@cache
def included(name: str) -> frozenset[str]:
    """What a native source or template is made of, by the compiler, for either side of one that is read twice."""
    found: set[str] = set()
    for side in ((), ("-D__CUDACC__",)) if ".cu" in name else ((),):
        command = [
            "g++",
            "-x",
            "c++",
            "-std=c++20",
            "-DGM_LEVEL=base",
            "-MM",
            "-MG",
            "-Ikernels/_native",
            *side,
            name,
        ]
        process = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=True).stdout
        found |= {os.path.normpath(part) for part in process.replace("\\\n", " ").split()[1:]}
    if name.endswith(".in"):  # and the table that it is filled from
        (table,) = re.findall(r"gm-table: (\S+)", (PACKAGE / name).read_text())
        found.add(str(Path(name).parent / table))
    return frozenset(one for one in found if (PACKAGE / one).is_file())


def literal(node: ast.expr) -> str:
    """A string or f-string as a regular expression; AssertionError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    assert isinstance(node, ast.JoinedStr), f"an entry must be written out: {ast.unparse(node)}"
    return "".join(literal(v) if isinstance(v, ast.Constant) else r"\w+" for v in node.values)


@cache
def called(name: str) -> frozenset[str]:
    """Entries that a file names in calls, as regular expressions."""
    calls = (n for n in ast.walk(tree(name)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    own = {n.name for n in ast.walk(tree(name)) if isinstance(n, ast.FunctionDef)}
    return frozenset(literal(n.args[0]) for n in calls if n.func.id in CALLS and n.func.id not in own)


@cache
def native_reach(entries: frozenset[str]) -> frozenset[str]:
    """Files of the sources that define `entries`, of those whose entries they name, and of the libraries' own."""
    found: set[str] = set()
    for name in NATIVE:
        if not name.endswith((".cpp", ".cu", ".cu.in")) or name.startswith("kernels/_native/"):
            continue
        text = (PACKAGE / name).read_text().replace("@", "_")  # any text stands for a placeholder
        if any(re.search(rf"(GM_KERNEL\(|GM_CUDA_ENTRY\(|#define GM_ENTRY ){e}\b", text) for e in entries):
            files = included(name)
            found |= files
            found |= included(f"kernels/_native/{'threads' if name.endswith('.cpp') else 'cuda_driver'}.cpp")
            others = {
                e
                for f in files
                for e in re.findall(r"^[^/\n]*GM_CAT\((gm_\w+)", (PACKAGE / f).read_text(), re.M)
            }
            if others - entries:
                found |= native_reach(frozenset(others))
    return frozenset(found)


@cache
def expected(modules: tuple[str, ...]) -> frozenset[str]:
    python = python_reach(modules)
    return python | native_reach(frozenset(e for name in python for e in called(name)))


def wrong(kernels: tuple[Kernel, ...] = KERNELS, files: list[str] = PYTHON + NATIVE) -> list[str]:
    """Kernels and files where an edit of the file changes the hash and should not, or does not and should."""
    plain = {path: read_file(path) for path in (str(PACKAGE / name) for name in PYTHON + NATIVE)}
    texts: dict[str, bytes | None] = dict(plain)

    def read(path: str) -> bytes | None:
        if path not in texts:
            texts[path] = plain[path] = read_file(path)
        return texts[path]

    groups = {modules_of(kernel): kernel.name for kernel in kernels}
    before = {modules: Sources(read).code_hash(modules, {}, built=False) for modules in groups}
    found = []
    for name in files:
        path = str(PACKAGE / name)
        texts[path] = (plain[path] or b"") + (b"\n# edited\n" if name.endswith(".py") else b"\n// edited\n")
        edited = Sources(read)
        for modules, kernel in groups.items():
            changed = edited.code_hash(modules, {}, built=False) != before[modules]
            if changed != (name in expected(modules)):
                found.append(
                    f"{kernel}: an edit of {name} {'changes' if changed else 'does not change'} its hash"
                )
        texts[path] = plain[path]
    return found


def test_an_edit_of_a_file_changes_the_hashes_of_the_kernels_that_reach_it_and_no_others() -> None:
    assert wrong() == []


def only_at_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = closure._IMPORT.pattern.replace("^[ \\t]*(?:from", "^(?:from")
    monkeypatch.setattr(closure, "_IMPORT", re.compile(pattern, re.M))


def one_include_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_sources, "_INCLUDE", re.compile(r'^#include "((?!_flash_rows)[^"\n]+)"', re.M))


def typed_imports_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "_TYPED", re.compile(r"^(nothing)(at all)", re.M))


@pytest.mark.parametrize(
    ("fault", "kernel", "file", "does"),
    [
        (only_at_the_margin, "moe_chain_triton", "kernels/moe/combine_triton.py", "does not change"),
        (one_include_missed, "mla_attention_cpu", "kernels/attention/_flash_rows_cpu.h", "does not change"),
        (typed_imports_followed, "linear_dequant_torch", "quant/rtn.py", "changes"),
    ],
)
def test_a_closure_that_misses_something_is_found_out(
    fault: Callable[[pytest.MonkeyPatch], None],
    kernel: str,
    file: str,
    does: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = tuple(k for k in KERNELS if k.name == kernel)
    assert wrong(some, [file]) == []
    fault(monkeypatch)
    read_module.cache_clear()
    native_sources._read.cache_clear()
    try:
        assert wrong(some, [file]) == [f"{kernel}: an edit of {file} {does} its hash"]
    finally:
        read_module.cache_clear()
        native_sources._read.cache_clear()


def test_imports_are_read_as_python_reads_them() -> None:
    for name in PYTHON + names("autotune/*.py", "bench/**/*.py", "runtime/**/*.py"):
        said = set()
        for node in runs(tree(name)):
            if isinstance(node, ast.Import):
                said |= {(alias.name, ()) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                pairs = tuple((alias.name, alias.asname or alias.name) for alias in node.names)
                said.add(("." * node.level + (node.module or ""), pairs))
        assert set(read_module((PACKAGE / name).read_bytes()).imports) == said, name


def test_what_else_of_the_registry_a_kernel_imports_only_describes_it() -> None:
    """A module of the registry that launchers begin to use is either counted in the closure or added here, with thought."""
    taken: set[str] = set()
    for kernel in KERNELS:
        for name in python_reach(modules_of(kernel)):
            for base, names_of in read_module((PACKAGE / name).read_bytes()).imports:
                if base.startswith("gristmill.kernel_registry"):
                    homes = Sources()._imported_modules(base, names_of)
                    taken |= {file_of(home) or "" for home in homes}
    described = {
        f"kernel_registry/{name}.py"
        for name in ("arguments", "kernel", "layout", "op", "problem", "requirement", "target")
    }
    described |= {"kernel_registry/registry.py", "kernel_registry/__init__.py"}
    assert {name for name in taken if not counted(name)} <= described
    assert {name for name in taken if counted(name)} == {
        "kernel_registry/scheme.py",
        "kernel_registry/dtypes.py",
    }


def test_every_entry_that_a_launcher_calls_is_made_by_a_source() -> None:
    entries = [entry for source in Sources().present() for entry in source.entries]
    assert len(entries) == len(set(entries))
    seen = 0
    for name in names("kernels/**/*.py"):
        patterns = {entry_pattern(entry, {}) for entry in read_module((PACKAGE / name).read_bytes()).entries}
        for call in called(name):
            seen += 1
            assert any(call.replace(r"\w+", "*") == pattern for pattern in patterns), (name, call)
            assert any(fits(call.replace(r"\w+", "*"), entry) for entry in entries), (name, call)
    assert seen >= 20


def test_no_module_that_a_kernel_reaches_imports_by_a_name_made_at_run_time() -> None:
    """`import_module` hides what is run; a package may use it for names that it also imports under TYPE_CHECKING."""
    reached = {name for kernel in KERNELS for name in python_reach(modules_of(kernel))}
    hidden = {
        (name, ast.unparse(node))
        for name in reached
        for node in runs(tree(name))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    }
    assert hidden <= {
        ("kernels/linear/linear.py", "import_module(kernel.module)"),  # the spec, where the search begins
    }


def test_hashing_every_kernel_is_quick() -> None:
    read_module.cache_clear()
    native_sources._read.cache_clear()
    sources = Sources()
    begin = time.process_time()
    for kernel in KERNELS:
        sources.code_hash(modules_of(kernel), {}, built=False)
    assert time.process_time() - begin < 0.6  # 0.15 s on an idle core
    begin = time.process_time()
    for _ in range(10):
        for kernel in KERNELS:
            sources.code_hash(modules_of(kernel), {}, built=False)
    assert (time.process_time() - begin) / (10 * len(KERNELS)) < 100e-6
