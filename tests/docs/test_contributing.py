"""CONTRIBUTING's worked examples, taken out of the page and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def files() -> dict[str, str]:
    blocks = re.findall(
        r"```python\n# (kernels/activation/\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S
    )
    return {Path(name).name: text for name, text in blocks}


def run(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(cache)}
    # Its Triton kernel is left out of automatic choice on a CPU; the worker does not know the folder, so nothing else runs.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    (cache / "sitecustomize.py").write_text(
        f"import sys\nimport gristmill.kernels.activation as family\nfamily.__path__.append({str(folder)!r})\n"
    )
    environment["PYTHONPATH"] = f"{cache}{os.pathsep}{environment['PYTHONPATH']}"
    return subprocess.run(
        [sys.executable, "-c", CHECK, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def write(folder: Path, found: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in found.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_worked_examples_run_and_match(tmp_path: Path) -> None:
    found = files()
    assert set(found) == {"scale_rows.py", "scale_rows_triton.py", "_scale_rows_triton.py"}
    done = run(write(tmp_path / "worked", found), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["scale_rows_torch", "scale_rows_triton"]


def test_a_fault_in_a_worked_example_is_caught(tmp_path: Path) -> None:
    found = files()
    good = found["_scale_rows_triton.py"]
    found["_scale_rows_triton.py"] = good.replace("tl.load(s + row)", "tl.load(s)")
    assert found["_scale_rows_triton.py"] != good
    done = run(write(tmp_path / "worked", found), tmp_path)
    assert done.returncode != 0 and "scale_rows_triton" in done.stderr
