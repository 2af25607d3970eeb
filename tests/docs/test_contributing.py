"""CONTRIBUTING's worked examples, extracted from the page and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.packaging.test_cuda_build import configure

ROOT = Path(__file__).parents[2]

CHECK = """
import sys
import gristmill.kernels.activation as family
family.__path__.append(sys.argv[1])
from gristmill.autotune.device import device_target
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
registry = default_registry()
op, ran = registry.op("scale_rows"), []
for kernel in registry.kernels_of("scale_rows"):
    for text in op.examples:
        problem = op.problem(text)
        outcome = verify(op, kernel, kernel.config(problem, device_target("cpu", Policy())), problem, "cpu")
        assert outcome.ok, (kernel.name, text, outcome)
    ran.append(kernel.name)
import torch
import gristmill.ops as ops
x, s = torch.randn(5, 9), torch.rand(5)
assert torch.equal(ops.scale_rows(x, s), x * s[:, None])
assert str(op.describe(x, s)) == "m=5,n=9,x=fp32"
for wrong, said in (
    ((x, s[:4]), "s must be [m] = [5]"),
    ((torch.randn(9, 5).t(), s), "x must be contiguous"),
    ((x, s.half()), "s must be torch.float32"),
):
    try:
        ops.scale_rows(*wrong)
    except (TypeError, ValueError) as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
print(" ".join(sorted(ran)))
"""


def files(kind: str = "") -> dict[str, str]:
    """Returns the files of the page's examples: the operation with its Triton kernel, the CUDA kernel (_sm90), that in CuTe DSL (_cutedsl)."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|cuda)\n(?:#|//) (kernels/activation/\S+)\n(.*?)```", page, re.S)
    kinds = [next((one for one in ("_sm90", "_cutedsl") if one in name), "") for name, _ in blocks]
    return {Path(name).name: text for (name, text), of in zip(blocks, kinds, strict=True) if of == kind}


def run(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(cache)}
    # A Triton kernel is never selected automatically on a CPU, and the worker does not know the folder:
    # nothing else runs.
    (cache / "sitecustomize.py").write_text(
        f"import sys\nimport gristmill.kernels.activation as family\nfamily.__path__.append({str(folder)!r})\n"
    )
    return forked.run("-c", CHECK, str(folder), env=environment, path=(cache,))


def write(folder: Path, contents: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_worked_examples_run_and_match(tmp_path: Path) -> None:
    paths = files()
    assert set(paths) == {"scale_rows.py", "scale_rows_triton.py"}
    result = run(write(tmp_path / "worked", paths), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["scale_rows_torch", "scale_rows_triton"]


def test_a_fault_in_a_worked_example_is_caught(tmp_path: Path) -> None:
    paths = files()
    good = paths["scale_rows_triton.py"]
    paths["scale_rows_triton.py"] = good.replace("tl.load(s + row)", "tl.load(s)")
    assert paths["scale_rows_triton.py"] != good
    result = run(write(tmp_path / "worked", paths), tmp_path)
    assert result.returncode != 0 and "scale_rows_triton" in result.stderr


CUDA_CHECK = """
import sys
import torch
import gristmill.kernels.activation as family
family.__path__.append(sys.argv[1])
from pathlib import Path
from gristmill.kernels import native
native.library_dir = lambda: Path(sys.argv[2])
import gristmill
explained = {c.kernel.name: c for c in gristmill.explain("scale_rows", "m=3,n=5", "sm_120").candidates}
assert "sm_120 lacks wgmma" in " ".join(explained["scale_rows_sm90"].reasons), explained
from gristmill.kernel_registry import default_registry
kernel = default_registry().kernel("scale_rows", "scale_rows_sm90")
assert kernel.accepts(default_registry().op("scale_rows").problem("m=3,n=5,x=fp16")) == "x must be bf16, got fp16"
launch = kernel.load()
device = "cuda" if torch.cuda.is_available() else "cpu"
x, s = torch.randn(7, 257, device=device).bfloat16(), torch.rand(7, device=device)
out = torch.full_like(x, float("nan"))
Call = default_registry().op("scale_rows").Call
launch({}, Call(x[:0], s[:0], out[:0]))
try:
    launch({}, Call(x, s, out))
    assert torch.equal(out, (x.float() * s[:, None]).bfloat16())
except ValueError as error:  # the entry was called, and refuses device -1, where a tensor of a CPU is
    assert device == "cpu" and "an argument out of its range" in str(error), error
"""


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("nvcc", "cmake", "ninja")), reason="nvcc, cmake and ninja"
)
def test_the_cuda_example_is_built_and_called(tmp_path: Path) -> None:
    """Two files: built by CMake like any other source, loaded, called with the launcher's arguments; a
    misspelt entry is reported."""
    paths = files("_sm90")
    assert set(paths) == {"scale_rows_sm90.py", "_scale_rows_sm90.cu"}
    folder = write(tmp_path / "worked", {**paths, "scale_rows.py": files()["scale_rows.py"]})
    source = folder / "_scale_rows_sm90.cu"
    code = "from scale_rows import OP; from gristmill.kernel_registry.call_struct import header; print(header(OP))"
    written = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    (folder / "calls").mkdir()
    (folder / "calls" / "scale_rows.h").write_text(written.stdout)
    result = configure(tmp_path / "build", "-DGRISTMILL_CUDA=on", f"-DGRISTMILL_SM90_SOURCES={source}")
    assert result.returncode == 0, result.stderr
    build = ["cmake", "--build", str(tmp_path / "build"), "--target", "gristmill_cuda_sm90a"]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    def checked() -> subprocess.CompletedProcess[str]:
        return forked.run("-c", CUDA_CHECK, str(folder), str(tmp_path / "build" / "_lib"))

    result = checked()
    assert result.returncode == 0, result.stderr
    spec = folder / "scale_rows_sm90.py"
    spec.write_text(spec.read_text().replace('"gm_scale_rows_sm90"', '"gm_scale_row_sm90"'))
    assert "gm_scale_row_sm90 of" in checked().stderr
