"""Every kernel of the registry that can run here, on every example of its operation, against the reference.

C++ kernels run at each ISA level of this CPU, Triton kernels in the interpreter. A new kernel adds its rows
here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.grades import RECORDS
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from tests.conftest import HAS_GPU

REGISTRY = default_registry()
CPU = device_target("cpu", Policy())
BUILD = confirmed_build(REGISTRY, CPU)


def _targets(kernel: Kernel) -> list[Target]:
    if kernel.language == "cpp":
        return [Target.parse(level) for level in CPU.levels]
    return [CPU]


def _rows() -> list[Any]:
    rows = []
    for kernel in REGISTRY.all_kernels():
        op = REGISTRY.op(kernel.op)
        for target in _targets(kernel):
            if kernel.requires.check_hardware(target, BUILD) or kernel.requires.check_build(target, BUILD):
                continue
            rows += [
                pytest.param(op, kernel, target, text, id=f"{kernel.name}-{target.name}-{text}")
                for text in op.test_problems(kernel)
            ]
    return rows


@pytest.mark.parametrize(("op", "kernel", "target", "text"), _rows())
def test_kernel_matches_reference(op: Op, kernel: Kernel, target: Target, text: str) -> None:
    if kernel.language == "triton" and HAS_GPU:
        pytest.skip("with a GPU here Triton kernels run on it, in the gpu tests")
    problem = op.problem(text)
    outcome = verify(op, kernel, kernel.config(problem, target), problem, "cpu")
    assert outcome.ok, outcome.reason


def test_records_of_proof_name_levels_that_ran_here() -> None:
    """`TESTED_LEVELS` of ci/grades.py: CI's processor has them, and every kernel with such a record ran on them above."""
    if "cpu:avx2" not in CPU.levels or "avx2" not in BUILD.cpu_levels:
        pytest.skip("this processor or this build lacks the level of CI's processors")
    ran: dict[str, set[str]] = {}
    for row in _rows():
        _, kernel, target, _ = row.values
        ran.setdefault(kernel.name, set()).update([target.name] if kernel.language == "cpp" else CPU.levels)
    records = json.loads(RECORDS.read_text(encoding="utf-8"))["elsewhere"]
    recorded = records["tests/kernels/test_registry_kernels.py"]
    assert len(recorded) > 50
    for name, entry in recorded.items():
        assert {*entry["on"]} <= ran[name], name


def _cut(op: Op, kernel: Kernel, text: str) -> Problem:
    problem = op.problem(text)
    return op.verification(problem, kernel, kernel.config(problem, CPU))


def _cut_rows() -> list[object]:
    """Returns problems whose static sizes are cut for verification, at the best level; in the interpreter,
    the smallest per kernel."""
    rows = []
    for kernel in REGISTRY.all_kernels():
        op = REGISTRY.op(kernel.op)
        if (
            op.shrink is None
            or kernel.requires.check_hardware(CPU, BUILD)
            or kernel.requires.check_build(CPU, BUILD)
        ):
            continue
        cut = [
            text
            for text in op.bench
            if kernel.accepts(op.problem(text)) is None and _cut(op, kernel, text) != op.problem(text)
        ]
        if kernel.language == "triton":
            cut = sorted(cut, key=lambda text: op.cost(_cut(op, kernel, text)).flops)[: 0 if HAS_GPU else 1]
        rows += [pytest.param(op, kernel, text, id=f"{kernel.name}-{text}") for text in cut]
    return rows


INTERPRETED = {"linear": {"n": 64}, "grouped_linear": {"n": 64, "e": 4}, "moe": {"h": 256, "i": 128, "e": 8}}
"""Sizes of `shrink` for the interpreter, which takes up to a minute for the 1024 rows that `shrink` leaves.
"""


@pytest.mark.parametrize(("op", "kernel", "text"), _cut_rows())
def test_configuration_of_a_large_problem_serves_the_cut_one_it_is_verified_on(
    op: Op, kernel: Kernel, text: str
) -> None:
    """As in resolution: a configuration must not contain sizes that `shrink` changes."""
    problem = op.problem(text)
    cut = _cut(op, kernel, text)
    if kernel.language == "triton":
        cut = cut.with_values(**INTERPRETED.get(op.name, {}))
    outcome = verify(op, kernel, kernel.config(problem, CPU), cut, "cpu")
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_operation_is_consistent(op: Op) -> None:
    """Generated arguments describe the problem that they were made for; costs and tolerances exist; the text
    form round-trips."""
    for text in (*op.examples, *op.bench):
        problem = op.problem(text)
        assert op.problem(str(problem)) == problem
        cost = op.cost(problem)
        assert cost.bytes >= 0 and cost.flops >= 0
        assert 0 <= op.tolerance(problem).limit < 0.05
    for text in op.examples:
        problem = op.problem(text)
        arguments = op.inputs(problem, 0, "cpu")
        assert len(arguments) == len(op.parameters)
    assert op.examples and op.bench, "an operation has examples to test and problems to measure"
    assert op.bucket is None or any(axis.name == op.bucket and axis.dynamic for axis in op.axes)


@pytest.mark.parametrize("kernel", list(REGISTRY.all_kernels()), ids=lambda kernel: kernel.name)
def test_every_kernel_has_problems_to_prove_it_on(kernel: Kernel) -> None:
    """A kernel that accepts none of its operation's examples declares its own, and accepts those."""
    op = REGISTRY.op(kernel.op)
    assert op.test_problems(kernel) and {*kernel.examples} <= {*op.test_problems(kernel)}


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_operation_can_run_on_any_cpu(op: Op) -> None:
    """Some kernel of every operation, the torch one, accepts every example on a CPU without a compiler."""
    for text in op.examples:
        problem = op.problem(text)
        able = [
            k
            for k in REGISTRY.kernels_of(op.name)
            if k.language == "python" and not k.requires.vendors and k.accepts(problem) is None
        ]
        assert able, f"{op.name} {text}: no kernel without requirements"
