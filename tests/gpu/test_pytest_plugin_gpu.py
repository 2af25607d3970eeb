"""gristmill.bench.pytest_plugin on a GPU: audited timings of graphs over cold arguments, which wait for the
device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(
        importlib.util.find_spec("pytest_benchmark") is None,
        reason="the package pytest-benchmark is not installed",
    ),
]
ROOT = Path(__file__).parents[2]
SUITE = """
import torch
from tests.gpu import test_bench_gpu as zoo

LARGE = f"m={torch.cuda.get_device_properties(0).L2_cache_size // 16384},n=1024"  # x and the result fill a quarter of the cache

def test_cold(kernel_benchmark):
    times = kernel_benchmark("rms_norm", LARGE, kernel="rms_norm_triton")
    assert times.timing == "graph,cold" and times.error <= times.tolerance and len(times.samples) == 16

def test_hot(kernel_benchmark):
    assert kernel_benchmark("rms_norm", LARGE, kernel="rms_norm_triton", hot=True).timing == "graph,hot"

def test_eager(kernel_benchmark):
    assert kernel_benchmark("rms_norm", LARGE, kernel=zoo.kernel(zoo.honest, capturable=False)).timing == "eager,cold"

def test_long(kernel_benchmark):
    kernel_benchmark("rms_norm", "m=65536,n=8192", kernel="rms_norm_triton", rounds=5)

def test_selected(kernel_benchmark):
    assert kernel_benchmark("rms_norm", "m=4,n=4096").us > 0.5

def test_left_on_another_stream(kernel_benchmark):
    kernel_benchmark("rms_norm", "m=4096,n=8192", kernel=zoo.kernel(zoo.work_left_on_another_stream, capturable=False))

def test_cached(kernel_benchmark):
    kernel_benchmark("rms_norm", "m=64,n=2048", kernel=zoo.kernel(zoo.results_cached_by_pointer))
"""


def test_a_suite_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["gristmill.bench.pytest_plugin"]\n')
    (tmp_path / "test_theirs.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "policy.toml").write_text(f'cache = "{tmp_path}"\n')
    outer = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rA",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--benchmark-only",
            "--benchmark-json=out.json",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={
            **outer,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "GRISTMILL_POLICY": str(tmp_path / "policy.toml"),
            "COLUMNS": "200",
        },
    )
    assert "2 failed, 5 passed" in process.stdout, process.stdout + process.stderr
    for name in ("left_on_another_stream", "cached"):
        assert (
            f"FAILED test_theirs.py::test_{name} - gristmill.autotune.candidate.WrongResultError"
            in process.stdout
        ), process.stdout
    output = {one["name"]: one for one in json.loads((tmp_path / "out.json").read_text())["benchmarks"]}
    cold, hot, eager, long = (
        output[f"test_{name}"]["stats"]["median"] for name in ("cold", "hot", "eager", "long")
    )
    # Cold arguments come from memory. An eager chain of torch's operations takes longer than one kernel.
    assert hot < 0.98 * cold < eager
    # 2 GiB are read and written. A sample that ended before the device was done would be faster than any
    # memory allows.
    moved = 2 * 65536 * 8192 * 2
    assert moved / 2e13 < long < moved / 5e10 and output["test_long"]["extra_info"]["gbs"] == pytest.approx(
        moved / long / 1e9, rel=0.01
    )
    assert output["test_cold"]["extra_info"]["config"] and output["test_cold"]["extra_info"]["device"]
