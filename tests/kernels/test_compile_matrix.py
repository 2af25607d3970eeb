"""ci/compile_matrix.py fails on the faults that it exists for: kernels planted by an entry point, each with
one fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.kernel_registry.closure import installed_sources
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import compile_matrix  # noqa: E402

pytest.importorskip("triton", reason="triton is not installed")

PLANT = '''
"""Kernels of rms_norm for the compile matrix: two good ones, one that promises what it does not contain, one that does not compile, one that reads
before it waits for the previous kernel."""
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement

KERNELS = tuple(
    Kernel(op="rms_norm", name=name, provider="planted", language="triton", target="planted_code:launch",
           aot=f"planted_code:{name}", requires=Requirement(code="triton"), summary=name)
    for name in ("good", "liar", "broken", "waits", "late")
)
'''
CODE = """
import triton
import triton.language as tl

from gristmill.kernels.aot import AotCase
from gristmill.kernels.dependent_launch import begin, overlap_on
from gristmill.kernels.lazy_triton import function_of

begin = function_of(begin)


@triton.jit
def waiting(x, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def reading(x, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    twice = 2 * tl.load(x + at, mask=at < n)
    begin(OVERLAP)
    tl.store(x + at, twice, mask=at < n)


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def shapes(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


def case(function, promises=(), more={}):
    constants = {"BLOCK": 4096} | more
    return [AotCase("only", function, {"x": "*fp32", "n": "i32"}, constants, {"num_warps": 4}, (), promises)]


def good(target): return case(double)
def liar(target): return case(double, ("wgmma",))
def broken(target): return case(shapes)
def waits(target): return case(waiting, (), overlap_on(target))
def late(target): return case(reading, (), overlap_on(target))
"""


@pytest.fixture
def matrix(tmp_path: Path, policy_file):
    """A function that compiles one planted kernel for sm_90 against a baseline and returns status, output and
    baseline."""
    policy_file()
    info = tmp_path / "planted-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[gristmill.kernels]\nplanted = planted\n")
    (tmp_path / "planted.py").write_text(PLANT)
    (tmp_path / "planted_code.py").write_text(CODE)
    path = tmp_path / "baseline.json"

    def run(
        kernel: str, baseline: dict[str, object] | None = None, *options: str
    ) -> tuple[int, str, dict[str, object]]:
        if baseline is not None:
            path.write_text(json.dumps(baseline))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT / 'src')}",
        }
        process = subprocess.run(
            [
                sys.executable,
                ROOT / "ci" / "compile_matrix.py",
                "--only",
                kernel,
                "--target",
                "sm_90",
                "--jobs",
                "1",
                "--baseline",
                path,
                *options,
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return (
            process.returncode,
            process.stdout + process.stderr,
            json.loads(path.read_text()) if path.exists() else {},
        )

    return run


def test_more_registers_than_the_baseline_fail(matrix) -> None:
    """A good kernel passes against its own baseline, and fails against one with fewer registers."""
    status, output, baseline = matrix("good", {"gone/case@sm_90": {"registers": 1, "spills": 0}}, "--update")
    assert status == 0, output
    assert list(baseline) == ["good/only@sm_90"], "--update forgets kernels that are no more"
    actual = baseline["good/only@sm_90"]
    assert matrix("good")[0] == 0
    assert actual["registers"] > 9
    status, output, _ = matrix("good", {"good/only@sm_90": {**actual, "registers": 0}})
    assert status == 1 and f"registers rose from 0 to {actual['registers']}" in output


def test_a_missing_instruction_fails_even_an_update(matrix) -> None:
    status, output, _ = matrix("liar", {}, "--update")
    assert status == 1 and "promised instructions are missing: wgmma" in output


def test_a_kernel_that_reads_before_it_waits_fails(matrix) -> None:
    status, output, _ = matrix("waits", {}, "--update")
    assert status == 0, output
    status, output, _ = matrix("late", {}, "--update")
    assert status == 1 and "promised instructions are missing: dependent_launch" in output


def test_a_kernel_that_stops_compiling_fails(matrix) -> None:
    status, output, _ = matrix("broken", {"broken/only@sm_90": {"registers": 10, "spills": 0, "shared": 0}})
    assert status == 1 and "does not compile" in output


def test_spills_are_judged() -> None:
    """Spills beyond the baseline fail, and so do those of a kernel that the baseline does not have."""
    pair = next(iter(compile_matrix.pairs("rms_norm", "sm_90")))
    actual = {"registers": 40, "spills": 64, "shared": 0, "missing": []}
    assert compile_matrix.judge(pair, actual, {"registers": 40, "spills": 0}) == "spills rose from 0 to 64"
    assert "not in the baseline" in str(compile_matrix.judge(pair, actual, None))
    assert compile_matrix.judge(pair, actual, {"registers": 40, "spills": 64}) is None


def test_baseline_is_of_kernels_that_exist_and_compile() -> None:
    """All of them, but that Turing has too little shared memory for some tiles of attention."""
    baseline = json.loads(compile_matrix.BASELINE.read_text())
    known = {pair.key for pair in compile_matrix.pairs(None, None)}
    assert set(baseline) == known, "run ci/compile_matrix.py --only <kernel> --update"
    reasons = {key: entry["cannot"] for key, entry in baseline.items() if "cannot" in entry}
    assert {(key.partition("/")[0], key.partition("@")[2]) for key in reasons} == {
        (f"{name}_attention_triton{form}", "sm_75")
        for name, form in (("mla", ""), ("mla", "_split"), ("paged", ""), ("paged", "_split"), ("varlen", ""))
    }
    assert all("bytes of shared memory, and a block of sm_75 has 65536" in why for why in reasons.values())


def _sources(kernel: Kernel) -> list[str]:
    """Returns the source text that a Triton kernel is compiled from, as the hash of its record reads it."""
    files = installed_sources().reach(kernel.module, kernel.target.partition(":")[0]).files
    return [code for _, text in files if "@jit" in (code := text.decode())]


def test_products_promise_matrix_instructions() -> None:
    """Every kernel that multiplies tiles promises matrix instructions on every target that it runs on and that has them: Turing has none for
    bf16, the type of most cases."""
    products = 0
    for kernel in default_registry().all_kernels():
        if kernel.aot is None or not any("tl.dot" in text for text in _sources(kernel)):
            continue
        products += 1
        for name in set(compile_matrix.TARGETS) - {"sm_75"}:
            if kernel.requires.check_hardware(Target.parse(name)):
                continue
            cases = compile_matrix.load_attribute(kernel.aot)(Target.parse(name))
            assert any(case.promises for case in cases), f"{kernel.name} promises nothing on {name}"
    assert products >= 8
