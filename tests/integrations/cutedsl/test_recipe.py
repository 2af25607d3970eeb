"""CONTRIBUTING's kernel in CuTe DSL: found by the registry, compiled for Hopper, checks its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.test_contributing import files

CHECK = """
import sys
import gristmill.kernels.activation as family
family.__path__.append(sys.argv[1])
sys.path.insert(0, "ci")
import compile_matrix
import torch
from gristmill.kernel_registry import Target, default_registry
from gristmill.kernels import cutedsl
kernel = default_registry().kernel("scale_rows", "scale_rows_cutedsl")
problem = default_registry().op("scale_rows").problem("m=3,n=5")
config = kernel.config(problem, Target.parse("sm_90"))
(pair,) = compile_matrix.pairs("scale_rows_cutedsl", "sm_90")
usage = compile_matrix.compile_one(pair.kernel.name, pair.kernel.op, pair.case, pair.target)
assert 0 < usage["registers"] < 64 and not usage["spills"], usage
from gristmill.kernels.activation._scale_rows_cutedsl import scale_rows
run = cutedsl.program(scale_rows, config)
x = torch.zeros(3, 5, dtype=torch.bfloat16)
try:
    run(x, torch.zeros(3), x)
except ValueError as error:
    assert "device_type=cuda" in str(error), error
else:
    raise AssertionError("tensors of a CPU were taken")
print("compiled")
"""


def test_the_worked_example_compiles(tmp_path: Path) -> None:
    contents = files() | files("_cutedsl")
    assert {"scale_rows_cutedsl.py", "_scale_rows_cutedsl.py"} < set(contents)
    for name, text in contents.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0 and result.stdout.split() == ["compiled"], result.stderr
