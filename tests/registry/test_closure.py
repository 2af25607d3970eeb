"""The closure of every kernel agrees with what Python and a C++ compiler read from the same files, for every
file."""

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
from ci.budget import pace, timed_work

from gristmill.kernel_registry import closure, native_sources
from gristmill.kernel_registry.closure import Sources, entry_pattern, read_file, read_module
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.native_sources import Compiled, fits
from gristmill.kernel_registry.registry import default_registry

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "gristmill"
KERNELS = tuple(default_registry().all_kernels())
CALLS = {
    "cpu_function",
    "cuda_function",
    "hip_function",
    "best_level",
    "best_config",
    "CallEntry",
    "PtxCallEntry",
    "cuda_entry",
    "ptx_entry",
    "hip_entry",
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ says what a source includes")


def modules_of(kernel: Kernel) -> tuple[str, str]:
    return kernel.module, kernel.target.partition(":")[0]


def names(*patterns: str) -> list[str]:
    """Returns the files that match the patterns, as names within the package."""
    actual = (path for pattern in patterns for path in PACKAGE.glob(pattern))
    return sorted({str(path.relative_to(PACKAGE)) for path in actual})


PYTHON = names("kernels/**/*.py", "quant/**/*.py", "kernel_registry/*.py")
NATIVE = names(*(f"kernels/**/*.{end}" for end in ("cpp", "cu", "cu.in", "hip", "h", "cuh", "json")))


# An independent oracle: ast and imports for Python, g++ for includes.


def runs(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields every node that may run, so nothing under ``if TYPE_CHECKING``."""
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
    """Returns the file of a module, as a name within the package."""
    if not module.startswith("gristmill."):
        return None
    stem = module.removeprefix("gristmill.").replace(".", "/")
    return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if (PACKAGE / name).is_file()), None)


@cache
def imported(name: str) -> frozenset[str]:
    """Returns the other files that the imports of a file run. A name that is not a module is resolved to the
    module that defines it."""
    files: set[str | None] = set()
    package = "gristmill." + str(Path(name).parent).replace("/", ".")
    for node in runs(tree(name)):
        if isinstance(node, ast.Import):
            files |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            if not base.startswith("gristmill"):
                continue
            for alias in node.names:
                module = file_of(f"{base}.{alias.name}")
                files.add(module or file_of(base))
                if module is None and (file_of(base) or "").endswith("__init__.py"):
                    home = getattr(getattr(importlib.import_module(base), alias.name), "__module__", base)
                    files.add(file_of(home))
    return frozenset(one for one in files if one is not None and counted(one))


def counted(name: str) -> bool:
    registry = tuple(f"kernel_registry/{module}.py" for module in ("scheme", "dtypes", "call_struct"))
    return name.startswith(("kernels/", "quant/")) or name in registry


@cache
def python_reach(modules: tuple[str, ...]) -> frozenset[str]:
    files: set[str] = set()
    waiting = [name for name in map(file_of, modules) if name]
    while waiting:
        name = waiting.pop()
        if name in files:
            continue
        files.add(name)
        waiting += imported(name)
        for folder in Path(name).parents:
            if (PACKAGE / folder / "__init__.py").is_file() and counted(f"{folder}/__init__.py"):
                waiting.append(f"{folder}/__init__.py")
    return frozenset(files)


@cache
def included(name: str) -> frozenset[str]:
    """Returns the files that a native source or template includes, according to the compiler, as host and as
    device code."""
    files: set[str] = set()
    device = "-D__CUDACC__" if ".cu" in name else "-D__HIP__"
    template = name.endswith(".in")
    text = re.sub(r"@\w+@", "1", (PACKAGE / name).read_text()) if template else None
    where = ["-iquote", str(Path(name).parent), "-"] if template else [name]
    for side in ((), (device,)) if ".cu" in name or name.endswith(".hip") else ((),):
        command = [
            "g++",
            "-x",
            "c++",
            "-std=c++20",
            "-DGM_LEVEL=base",
            "-nostdinc",  # which headers of the system there are decides nothing
            "-MM",
            "-MG",
            "-Ikernels/_native",
            "-Ikernels",
            *side,
            *where,
        ]
        process = subprocess.run(
            command, cwd=PACKAGE, capture_output=True, text=True, check=True, input=text
        ).stdout
        files |= {os.path.normpath(part) for part in process.replace("\\\n", " ").split()[1:]}
    if template:  # itself, and the table that fills it
        (table,) = re.findall(r"gm-table: (\S+)", (PACKAGE / name).read_text())
        files |= {name, os.path.normpath(Path(name).parent / table)}
    return frozenset(one for one in files if (PACKAGE / one).is_file())


def literal(node: ast.expr) -> str:
    """Converts a string or f-string to a regular expression. Raises AssertionError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    assert isinstance(node, ast.JoinedStr), f"an entry must be written out: {ast.unparse(node)}"
    return "".join(literal(v) if isinstance(v, ast.Constant) else r"\w+" for v in node.values)


@cache
def called(name: str) -> frozenset[str]:
    """Returns the entries that a file calls by name, as regular expressions."""
    calls = (n for n in ast.walk(tree(name)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    defined_here = {n.name for n in ast.walk(tree(name)) if isinstance(n, ast.FunctionDef)}
    return frozenset(
        literal(n.args[0])
        for n in calls
        if n.func.id in CALLS
        and n.func.id not in defined_here
        and name
        not in (
            "kernels/native_call.py",
            "kernels/cuda_ptx.py",
            "kernels/cuda_ptx_call.py",
        )
    )


@cache
def native_reach(entries: frozenset[str]) -> frozenset[str]:
    """Returns the files of the sources that define `entries`, of sources that those call, and of the
    libraries' own."""
    reached: set[str] = set()
    for name in NATIVE:
        if not name.endswith((".cpp", ".cu", ".cu.in", ".hip")) or name.startswith("kernels/_native/"):
            continue
        text = (PACKAGE / name).read_text().replace("@", "_")  # any text may replace a placeholder
        if any(
            re.search(
                rf"(GM_KERNEL\(|GM_C\w+_CALL\(|GM_(?:CPU|CUDA|HIP)_(?:ENTRY|ARGS)\(|#define GM_ENTRY ){e}\b",
                text,
            )
            for e in entries
        ):
            files = included(name)
            reached |= files
            own = {".cpp": "threads", ".hip": "hip_driver"}.get(Path(name).suffix, "cuda_driver")
            reached |= included(f"kernels/_native/{own}.cpp")
            others = {
                e
                for f in files
                for e in re.findall(
                    r"^[^/\n]*(?:GM_CAT\(|extern \"C\" int )(gm_\w+)", (PACKAGE / f).read_text(), re.M
                )
            }
            if others - entries:
                reached |= native_reach(frozenset(others))
    return frozenset(reached)


@cache
def expected(modules: tuple[str, ...]) -> frozenset[str]:
    python = python_reach(modules)
    return python | native_reach(frozenset(e for name in python for e in called(name)))


def mismatches(kernels: tuple[Kernel, ...] = KERNELS, files: list[str] = PYTHON + NATIVE) -> list[str]:
    """Returns (kernel, file) pairs in which an edit of the file changes the hash although it should not, or
    the reverse."""
    plain = {path: read_file(path) for path in (str(PACKAGE / name) for name in PYTHON + NATIVE)}
    texts: dict[str, bytes | None] = dict(plain)

    def read(path: str) -> bytes | None:
        if path not in texts:
            texts[path] = plain[path] = read_file(path)
        return texts[path]

    def edit(name: str) -> None:
        path = str(PACKAGE / name)
        texts[path] = (plain[path] or b"") + (b"\n# edited\n" if name.endswith(".py") else b"\n// edited\n")

    groups = {modules_of(kernel): kernel.name for kernel in kernels}
    unedited = Sources(read)
    before = {modules: unedited.code_hash(modules, {}, built=False) for modules in groups}
    errors = []
    # A kernel whose hash stays when every file that should not matter is edited has none of them in it.
    suspects, present = set(), dict[tuple[str, ...], tuple[Compiled, ...]]()
    for modules in groups:
        others = [name for name in files if name not in expected(modules)]
        for name in others:
            edit(name)
        native = tuple(name for name in others if not name.endswith(".py"))
        if native not in present:
            present[native] = Sources(read).present()
        edited = Sources(read, _present=present[native])
        if edited.code_hash(modules, {}, built=False) != before[modules]:
            suspects.add(modules)
        texts.update(plain)
    for name in files:
        affected = [modules for modules in groups if modules in suspects or name in expected(modules)]
        edit(name)
        # What is of the other language is as it was, and so is what was found without this file: they take most of the time.
        if name.endswith(".py"):
            edited = Sources(
                read,
                _present=unedited.present(),
                _steps={module: step for module, step in unedited._steps.items() if name not in step.files},
                _reach={
                    key: reach for key, reach in unedited._reach.items() if name not in dict(reach.files)
                },
            )
        elif name.endswith(".json"):  # which modules read, and tables of native sources are
            edited = Sources(read)
        else:
            edited = Sources(read, _reach=unedited._reach)
        for modules in affected:
            changed = edited.code_hash(modules, {}, built=False) != before[modules]
            if changed != (name in expected(modules)):
                errors.append(
                    f"{groups[modules]}: an edit of {name} {'changes' if changed else 'does not change'} its hash"
                )
        texts.update(plain)
    return errors


def test_an_edit_of_a_file_changes_the_hashes_of_the_kernels_that_reach_it_and_no_others() -> None:
    assert mismatches() == []


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
        (only_at_the_margin, "moe_chain_triton", "kernels/moe/combine/triton.py", "does not change"),
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
    assert mismatches(some, [file]) == []
    fault(monkeypatch)
    read_module.cache_clear()
    native_sources._read.cache_clear()
    try:
        assert mismatches(some, [file]) == [f"{kernel}: an edit of {file} {does} its hash"]
    finally:
        read_module.cache_clear()
        native_sources._read.cache_clear()


def test_imports_are_read_as_python_reads_them() -> None:
    for name in PYTHON + names("autotune/*.py", "bench/**/*.py", "runtime/**/*.py"):
        imports = set()
        for node in runs(tree(name)):
            if isinstance(node, ast.Import):
                imports |= {(alias.name, ()) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                pairs = tuple((alias.name, alias.asname or alias.name) for alias in node.names)
                imports.add(("." * node.level + (node.module or ""), pairs))
        assert set(read_module((PACKAGE / name).read_bytes()).imports) == imports, name


def test_what_else_of_the_registry_a_kernel_imports_only_describes_it() -> None:
    """A module of the registry that launchers begin to use is either counted in the closure or added here
    deliberately."""
    files: set[str] = set()
    for kernel in KERNELS:
        for name in python_reach(modules_of(kernel)):
            for base, names_of in read_module((PACKAGE / name).read_bytes()).imports:
                if base.startswith("gristmill.kernel_registry"):
                    homes = Sources()._imported_modules(base, names_of)
                    files |= {file_of(home) or "" for home in homes}
    described = {
        f"kernel_registry/{name}.py"
        for name in (
            "argument_names",
            "arguments",
            "call",
            "closure",  # names the files of compiled programs
            "kernel",
            "layout",
            "op",
            "policy",  # and their folder
            "problem",
            "requirement",
            "target",
        )
    }
    described |= {"kernel_registry/registry.py", "kernel_registry/__init__.py"}
    assert {name for name in files if not counted(name)} <= described
    assert {name for name in files if counted(name)} == {
        "kernel_registry/scheme.py",
        "kernel_registry/dtypes.py",
        "kernel_registry/call_struct.py",
    }


def test_every_entry_that_a_launcher_calls_is_made_by_a_source() -> None:
    entries = [entry for source in Sources().present() for entry in source.entries]
    assert len(entries) == len(set(entries))
    calls = 0
    for name in names("kernels/**/*.py"):
        patterns = {entry_pattern(entry, {}) for entry in read_module((PACKAGE / name).read_bytes()).entries}
        for call in called(name):
            calls += 1
            assert any(call.replace(r"\w+", "*") == pattern for pattern in patterns), (name, call)
            assert any(fits(call.replace(r"\w+", "*"), entry) for entry in entries), (name, call)
    assert calls >= 20


def test_no_module_that_a_kernel_reaches_imports_by_a_name_made_at_run_time() -> None:
    """`import_module` hides what runs. A package may use it for names that it also imports under
    TYPE_CHECKING."""
    reached = {name for kernel in KERNELS for name in python_reach(modules_of(kernel))}
    hidden = {
        (name, ast.unparse(node))
        for name in reached
        for node in runs(tree(name))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    }
    assert hidden <= {
        ("kernels/linear/op.py", "import_module(kernel.module)"),  # the spec, where the search starts
    }


def test_hashing_every_kernel_is_quick() -> None:
    read_module.cache_clear()
    native_sources._read.cache_clear()
    sources = Sources()
    slower = pace([timed_work()])
    begin = time.thread_time()
    for kernel in KERNELS:
        sources.code_hash(modules_of(kernel), {}, built=False)
    assert time.thread_time() - begin < 0.6 * slower  # 0.15 s on an idle core
    begin = time.thread_time()
    for _ in range(10):
        for kernel in KERNELS:
            sources.code_hash(modules_of(kernel), {}, built=False)
    assert (time.thread_time() - begin) / (10 * len(KERNELS)) < 100e-6 * slower
