"""gristmill.bench.pytest_plugin: another project's test suite measures kernels with pytest-benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytest_benchmark") is None,
    reason="the package pytest-benchmark is not installed",
)
ROOT = Path(__file__).parents[2]
SUITE = """
from dataclasses import replace
import pytest
from gristmill.autotune.candidate import WrongResultError
from gristmill.autotune.place import place
from tests.bench import cheats, slowed

def test_named(kernel_benchmark):
    times = kernel_benchmark("rms_norm", "m=100,n=2048", kernel="rms_norm_cpu", target="cpu", rounds=9)
    assert times.kernel == "rms_norm_cpu" and len(times.samples) == 9 and min(times.samples) <= times.us <= max(times.samples)
    assert times.error <= times.tolerance and times.timing == "eager,cold"

@pytest.mark.benchmark(group="mine")
def test_selected(kernel_benchmark):
    assert kernel_benchmark("rms_norm", "m=4,n=64", target="cpu", hot=True).timing == "eager,hot"

def test_cheat(kernel_benchmark):
    cheats.leave()
    kernel_benchmark("rms_norm", "m=100,n=2048", kernel=cheats.kernel(cheats.writes_skipped_after_a_while), target="cpu")

def test_of_another_device(kernel_benchmark):
    kernel_benchmark("rms_norm", "m=4,n=64", kernel="rms_norm_flashinfer", target="cpu")

def test_device_that_is_not_here(kernel_benchmark):
    kernel_benchmark("rms_norm", "m=4,n=64", target="gfx942")

def test_problem_that_it_does_not_take(kernel_benchmark):
    with pytest.raises(ValueError, match="linear_torch does not take"):
        kernel_benchmark("linear", "m=1,n=64,k=64,w=int4_g32", kernel="linear_torch", target="cpu")

def test_fault_in_the_child_process_of_a_gpu(kernel_benchmark, monkeypatch):
    here = replace(place("cpu"), device="cuda:0")
    monkeypatch.setattr("gristmill.bench.pytest_plugin.place", lambda target: here)
    monkeypatch.setattr("gristmill.bench.compare.verified", lambda *asked: f"no result on {asked[-1]}")
    with pytest.raises(WrongResultError, match="rms_norm_cpu: no result on cuda:0"):
        kernel_benchmark("rms_norm", "m=4,n=64", kernel="rms_norm_cpu")
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The output of that suite, and what pytest-benchmark stored."""
    place = tmp_path_factory.mktemp("suite")
    (place / "conftest.py").write_text('pytest_plugins = ["gristmill.bench.pytest_plugin"]\n')
    (place / "test_theirs.py").write_text(SUITE)
    (place / "pytest.ini").write_text("[pytest]\n")
    (place / "policy.toml").write_text(f'cache = "{place}"\n')
    # This suite is distributed over workers.
    outer = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    process = forked.run(
        *("-m", "pytest", "-rA", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("--benchmark-only", "--benchmark-json=out.json"),
        cwd=place,
        env={**outer, "GRISTMILL_POLICY": str(place / "policy.toml")},
        path=(ROOT,),
        workers=True,
    )
    assert (place / "out.json").exists(), process.stdout + process.stderr
    return process.stdout, json.loads((place / "out.json").read_text())


def test_times_are_those_of_the_kernel(outcome: tuple[str, dict[str, Any]]) -> None:
    shown, stored = outcome
    actual = {one["name"]: one for one in stored["benchmarks"]}
    named = actual["test_named"]
    assert (
        named["stats"]["rounds"] == 9
        and named["group"] == "rms_norm m=100,n=2048"
        and named["options"]["timer"].endswith("kernelbench")
    )
    info = named["extra_info"]
    assert (
        info["kernel"] == "rms_norm_cpu"
        and info["device"]
        and info["config"]["level"]
        and info["error"] <= info["tolerance"]
    )
    # The rate is bytes over the measured median; no round took the millisecond that a sample lasts.
    moved = (2 * 100 + 1) * 2048 * 2
    assert (
        info["gbs"] == pytest.approx(moved / named["stats"]["median"] / 1e9)
        and 1e-6 < named["stats"]["median"] < 1e-3
    )
    assert (
        actual["test_selected"]["group"] == "mine"
        and actual["test_selected"]["extra_info"]["timing"] == "eager,hot"
    )
    assert "PASSED test_theirs.py::test_named" in shown and "PASSED test_theirs.py::test_selected" in shown


def test_a_cheat_fails_its_test(outcome: tuple[str, dict[str, Any]]) -> None:
    shown, stored = outcome
    assert "FAILED test_theirs.py::test_cheat - gristmill.autotune.candidate.WrongRes" in shown


def test_what_cannot_run_is_skipped_with_its_reason(outcome: tuple[str, dict[str, Any]]) -> None:
    shown, _ = outcome
    assert (
        "rms_norm_flashinfer cannot run here" in shown and "gfx942 is not a device of this machine" in shown
    )
    assert "PASSED test_theirs.py::test_problem_that_it_does_not_take" in shown
    assert "PASSED test_theirs.py::test_fault_in_the_child_process_of_a_gpu" in shown
    assert "1 failed, 4 passed, 2 skipped" in shown
