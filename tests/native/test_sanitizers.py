"""ci/sanitize.sh catches the faults that it exists for: faults planted in a kernel, and a kernel that no
sanitizer program calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "kernels/norm/_rms_norm_cpu.cpp"
ROW = "kernels/norm/_rms_norm_row_cpu.h"
needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("g++", "cmake", "ninja"))), reason="g++, cmake or ninja is not installed"
)


def entries(source: Path) -> set[str]:
    return set(re.findall(r"^GM_(?:KERNEL|CPU_CALL|CPU_ARGS)\((\w+)", source.read_text(), re.MULTILINE))


def test_every_kernel_has_a_program() -> None:
    """Each entry of each C++ CPU source, and of each CPU kernel of the registry, is in the table of levels of
    some program."""
    called: set[str] = set()
    for program in (ROOT / "tests" / "native").glob("*_asan.cpp"):
        called |= set(re.findall(r"\bGM_LEVELS\((\w+)", program.read_text()))
    sources = [path for folder in ("kernels", "quant") for path in (ROOT / folder).rglob("_*_cpu.cpp")]
    built = set().union(*map(entries, sources))
    assert built, "no kernels found"
    assert built - called == set(), "add tests/native/<op>_asan.cpp; rms_norm_asan.cpp is the example"
    assert called - built == set(), "these programs call what is no more"
    modules = {path.stem: path for path in (ROOT / "kernels").rglob("*_cpu.py")}
    imports = re.compile(r"^from gristmill\.(kernels\.[\w.]+) import cpu\b", re.MULTILINE)
    for kernel in default_registry().all_kernels():
        if kernel.language != "cpp" or not kernel.module.startswith("gristmill."):
            continue
        spec = ROOT / (kernel.module.removeprefix("gristmill.").replace(".", "/") + ".py")
        text = spec.read_text()
        parts = {modules[name] for name in re.findall(r"\b\w+_cpu\b", text) if name in modules}  # of a chain
        parts |= {ROOT / folder.replace(".", "/") / "cpu.py" for folder in imports.findall(text)}
        used = set(re.findall(r'"(gm_\w+)"', text + "".join(part.read_text() for part in parts)))
        assert used and used <= called, f"{kernel.name} calls {used}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that ci/sanitize.sh reads, with one kernel at one level."""
    place = tmp_path_factory.mktemp("tree")
    for name in (
        "CMakeLists.txt",
        "cmake",
        "ci/sanitize.sh",
        "src/gristmill/__init__.py",
        "kernels/_native",
        KERNEL,
        ROW,
        "tests/native/rms_norm_asan.cpp",
        "tests/native/asan.h",
        "tests/native/asan_values.h",
        "tests/native/serial_threads.cpp",
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name)
        else:
            shutil.copy(ROOT / name, place / name)
    return place


def sanitize(tree: Path, old: str = "", new: str = "") -> tuple[int, str]:
    """Runs ci/sanitize.sh with `old` in the kernel, or in the header that it includes, replaced by `new`. Returns its status and
    output."""
    kernel, row = ((ROOT / name).read_text() for name in (KERNEL, ROW))
    assert old in kernel or old in row, (
        f"{KERNEL} and {ROW} have no {old!r} any more: plant the fault elsewhere"
    )
    (tree / KERNEL).write_text("// gm-levels: base neon\n" + (kernel.replace(old, new) if old else kernel))
    (tree / ROW).write_text(row.replace(old, new) if old else row)
    process = subprocess.run(
        ["bash", "ci/sanitize.sh"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"JOBS": "1"},
    )
    return process.returncode, process.stdout + process.stderr


@needs_tools
def test_a_clean_kernel_passes(tree: Path) -> None:
    status, output = sanitize(tree)
    assert status == 0 and "sanitizers: 1 of 1 entries ran clean" in output, output


@needs_tools
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "if (c < cols) store(out + c, load(x + c, cols - c)",
            "if (c < cols) store(out + c, load(x + c)",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        ("load(w + c, cols - c), cols - c);", "load(w + c, cols - c));", "AddressSanitizer:"),
        ("r < end; ++r", "r <= end; ++r", "AddressSanitizer:"),
        ("16384 / call.n + 1;", "16384 / call.n + (1 << (call.n + 31));", "runtime error: shift exponent"),
        ("1.0f / __builtin_sqrtf", "1.001f / __builtin_sqrtf", "does not hold"),
    ],
    ids=["tail read whole", "tail written whole", "a row too many", "undefined shift", "wrong value"],
)
def test_planted_faults_are_caught(tree: Path, old: str, new: str, complaint: str) -> None:
    status, output = sanitize(tree, old, new)
    assert status != 0 and complaint in output, output


@needs_tools
def test_a_kernel_without_a_program_fails(tree: Path) -> None:
    orphan = tree / "kernels" / "norm" / "_orphan_cpu.cpp"
    orphan.write_text(
        '// gm-levels: base neon\n#include "gm_cpu.h"\nGM_KERNEL(gm_orphan)(int) { return GM_OK; }\n'
    )
    try:
        status, output = sanitize(tree)
        assert status != 0 and "no sanitizer program calls gm_orphan__" in output, output
    finally:
        orphan.unlink()
