"""The worked example in the comment of each header of native kernels, extracted from it and compiled, and run where a CPU can."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gristmill.kernel_registry import call_struct
from gristmill.kernel_registry.arguments import Tensor
from gristmill.kernel_registry.problem import Axis
from gristmill.quant import argument_struct
from gristmill.quant.argument_struct import ArgumentStruct

from .test_hip_isa import FLAGS, TARGETS, clang

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "kernels" / "_native"
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-I{NATIVE}"]

MY_OP: Any = SimpleNamespace(
    name="my_op",
    axes=(Axis("n", "int", "elements"), Axis("x", "dtype", "dtype of both", choices=("fp32", "fp16"))),
    arguments=(Tensor("x", "n"),),
    returns=(Tensor("y", "n"),),
    bucket=None,
)
"""The operation of the example: y = 2 x."""
MY_ARGS = ArgumentStruct(
    "GmMyOpArgs",
    "The same as a struct of arguments.",
    "int32_t device;\nconst char* arch;\nvoid* stream;\nconst float* x;\nfloat* y;\nint32_t n;",
)

gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def example(header: str, folder: Path, suffix: str) -> Path:
    """The indented lines of a header's first comment that begin with its own #include, as a source."""
    comment = re.match(r"(?:(?://[^\n]*)?\n)+", (NATIVE / header).read_text(encoding="utf-8"))
    assert comment is not None
    found = re.findall(rf'(?m)^//   #include "{re.escape(header)}".*\n(?://   .*\n)*', comment[0])
    assert len(found) == 1, f"{header}: its comment has {len(found)} examples"
    path = folder / f"example{suffix}"
    path.write_text(re.sub(r"(?m)^//   ", "", found[0]), encoding="utf-8")
    (folder / "calls").mkdir()
    (folder / "calls" / "my_op.h").write_text(call_struct.header(MY_OP))
    (folder / "args.h").write_text(argument_struct.header([MY_ARGS]))
    return path


def compile_with(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@gcc
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_cpu(tmp_path: Path, dtype: type[np.floating]) -> None:
    source = example("gm_cpu.h", tmp_path, ".cpp")
    threads = tmp_path / "threads.cpp"  # in place of threads.cpp, which is linked with torch
    threads.write_text(
        "#include <cstdint>\n"
        'extern "C" int gm_parallel_raw(int64_t n, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {\n'
        "  return body(0, n, context), 0;\n}\n"
    )
    flags = ["-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-DGM_LEVEL=base"]
    sources = source, threads, NATIVE / "call_list.cpp"
    compile_with("g++", *WARNINGS, *flags, "-fPIC", "-shared", *sources, "-o", tmp_path / "cpu.so")
    x = np.arange(21, dtype=dtype)
    y = np.zeros(22, dtype=dtype)
    library = ctypes.CDLL(str(tmp_path / "cpu.so"))
    function = library["gm_my_op__base"]
    call = [x.ctypes.data, y.ctypes.data, 21, {"f": 0, "e": 1}[x.dtype.char]]
    assert function((ctypes.c_int64 * 4)(*call)) == 0
    assert function((ctypes.c_int64 * 4)(*call[:3], 9)) == -1  # GM_E_DTYPE
    assert (y == [*(2 * x), 0]).all()
    digest = library["call_of_gm_my_op__base"]
    digest.restype = ctypes.c_uint64
    assert digest() == call_struct.digest(MY_OP)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_cuda(tmp_path: Path) -> None:
    """Both halves: the cubin, and the host code that embeds it."""
    source = example("gm_cuda.h", tmp_path, ".cu")
    include = f"-I{NATIVE}"
    compile_with("nvcc", "-std=c++20", "-arch=sm_90a", "-cubin", include, source, "-o", tmp_path / "cubin")
    assert b"my_kernel" in (tmp_path / "cubin").read_bytes()
    host = ["-std=c++20", "-x", "c++", "-Xcompiler", "-Wall,-Wextra,-Werror", "-DGM_CUBIN_SYMBOL=gm_example"]
    compile_with("nvcc", *host, include, "-c", source, "-o", tmp_path / "host.o")
    assert b"gm_my_op" in (tmp_path / "host.o").read_bytes()


@gcc
def test_hip_host(tmp_path: Path) -> None:
    source = example("gm_hip.h", tmp_path, ".hip")
    compile_with("g++", "-x", "c++", *WARNINGS, "-DGM_HIP_IMAGES=gm_example", "-fsyntax-only", source)


@gcc
def test_hip_executed_by_fibers(tmp_path: Path) -> None:
    source = example("gm_hip.h", tmp_path, ".hip")
    flags = ["-DGM_HIP_FIBERS", "-DGM_LANES=32", f"-I{ROOT / 'tests' / 'native'}", "-fPIC", "-shared"]
    flags += ["-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]
    compile_with("g++", "-x", "c++", *WARNINGS, *flags, source, "-o", tmp_path / "fibers.so")
    x = np.arange(300, dtype=np.float32)
    y = np.zeros(301, dtype=np.float32)
    library = ctypes.CDLL(str(tmp_path / "fibers.so"))
    argument_struct.check_struct(library, "gm_my_op", MY_ARGS)
    args = MY_ARGS.new(arch=b"gfx1100", x=x.ctypes.data, y=y.ctypes.data, n=300)
    assert library.gm_my_op(ctypes.byref(args)) == 0
    assert (y == [*(2 * x), 0]).all()


def test_hip_device(tmp_path: Path) -> None:
    compiler = clang()
    source = example("gm_hip.h", tmp_path, ".hip")
    lanes, dot2 = TARGETS["gfx1100"]
    command = [compiler, "-x", "hip", "--offload-arch=gfx1100", "--offload-device-only", *FLAGS]
    command += [f"-DGM_LANES={lanes}", f"-DGM_DOT2_BF16={dot2}", f"-I{NATIVE}", "-Wall", "-Werror"]
    compile_with(*command, "-S", source, "-o", tmp_path / "example.s")


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format is not installed")
def test_the_formatter_keeps_comments() -> None:
    """A formatter that wraps comments makes prose of the code and of the tables in them."""
    line = "//   one       " + "two " * 40 + "\n//   three     four\nint x;\n"
    command = ["clang-format", f"--style=file:{ROOT / '.clang-format'}", "--assume-filename=x.h"]
    done = subprocess.run(command, input=line, capture_output=True, text=True, check=True)
    assert done.stdout == re.sub(r" +\n", "\n", line)
