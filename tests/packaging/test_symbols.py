"""The library's dependence on torch: only symbols of torch 2.11's stable C ABI, declared as torch declares
them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import check_symbols  # noqa: E402

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def build(tmp_path: Path, text: str, *options: str) -> Path:
    source, library = tmp_path / "x.cpp", tmp_path / "x.so"
    source.write_text(text)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library, *options], check=True)
    return library


def test_built_library_is_clean() -> None:
    assert check_symbols.DEFAULT.is_file(), "run `make build`"
    assert check_symbols.problems(check_symbols.DEFAULT, check_symbols.torch_symbols()) == []


def test_list_has_what_we_use() -> None:
    assert {"torch_parallel_for", "torch_get_num_threads"} <= check_symbols.torch_symbols()


@needs_compiler
@pytest.mark.parametrize(
    "text,options,complaint",
    [
        (
            'extern "C" int torch_new_in_2_13(); int f() { return torch_new_in_2_13(); }',
            (),
            "torch_new_in_2_13 is undefined",
        ),
        (
            'extern "C" void* PyList_New(long); void* f() { return PyList_New(0); }',
            (),
            "PyList_New is undefined",
        ),
        ("int f() { return 1; }", ("-Wl,-rpath,/opt/torch", "-Wl,--enable-new-dtags"), "RUNPATH"),
        ("#include <string>\nstd::string f() { return std::to_string(1); }", (), "libstdc"),
    ],
)
def test_planted_faults_are_found(
    tmp_path: Path, text: str, options: tuple[str, ...], complaint: str
) -> None:
    report = check_symbols.problems(build(tmp_path, text, *options), check_symbols.torch_symbols())
    assert any(complaint in line for line in report), report


@needs_compiler
def test_declarations_agree_with_torch(tmp_path: Path) -> None:
    """Compiles torch's header and ours in one file: a difference is a conflicting declaration."""
    include = Path(torch.__file__).parent / "include"
    if not (include / "torch" / "csrc" / "stable" / "c" / "shim.h").is_file():
        pytest.skip("this torch has no headers")
    source = tmp_path / "both.cpp"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += ["-I", str(include), "-I", str(ROOT / "kernels" / "_native"), str(source)]
    for text, agrees in (
        ('#include "torch_abi.h"\n', True),
        ('extern "C" int32_t torch_parallel_for(int, int);\n', False),
    ):
        source.write_text("#include <torch/csrc/stable/c/shim.h>\n" + text)
        assert (subprocess.run(command, capture_output=True).returncode == 0) is agrees
