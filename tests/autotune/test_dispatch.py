"""Operators: opcheck, torch.compile, dynamic shapes, refusals, and the cost of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.autotune import bound as bound_module
from gristmill.autotune.errors import UnpreparedError


@pytest.fixture(autouse=True)
def _policy(policy_file) -> None:
    policy_file()


def arguments(rows: int = 4, n: int = 256) -> tuple[torch.Tensor, torch.Tensor, float]:
    return torch.randn(rows, n), torch.rand(n), 1e-5


def test_opcheck_of_both_overloads() -> None:
    x, w, eps = arguments()
    torch.library.opcheck(torch.ops.gristmill.rms_norm.default, (x, w, eps))
    torch.library.opcheck(torch.ops.gristmill.rms_norm.out, (x, w, eps, 0, torch.empty_like(x)))


def test_torch_compile_compiles_once_for_all_sizes() -> None:
    compiled = 0

    def backend(graph, example):
        nonlocal compiled
        compiled += 1
        return graph.forward

    _, w, eps = arguments()
    function = torch.compile(
        lambda x: ops.rms_norm(x + 1, w, eps) * 2, backend=backend, dynamic=True, fullgraph=True
    )
    for rows in (2, 3, 5, 17, 130):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(function(x), ops.rms_norm(x + 1, w, eps) * 2)
    assert compiled == 1


def test_a_planned_call_refuses_what_it_was_not_planned_for() -> None:
    x, w, eps = arguments()
    plan = ops.bind("rms_norm", "n=256,x=fp32", "cpu")
    for bad in (
        (x[:, :128], w, eps, torch.empty(4, 128)),
        (x, w, eps, torch.empty(3, 256)),
        (x.bfloat16(), w, eps, torch.empty(4, 256)),
        (x, w[:7], eps, torch.empty(4, 256)),
    ):
        with pytest.raises(ValueError, match="rms_norm planned for n=256"):
            plan(*bad)


def test_unknown_operations_and_handles_are_named() -> None:
    with pytest.raises(AttributeError, match="did you mean rms_norm"):
        ops.rms_nrom  # noqa: B018
    x, w, eps = arguments()
    plan = ops.bind("rms_norm", "n=256,x=fp32", "cpu")
    handle = plan.handle
    ops.release(plan)
    with pytest.raises((ValueError, RuntimeError), match=f"handle {handle} was released"):
        torch.ops.gristmill.rms_norm.out(x, w, eps, handle, torch.empty_like(x))


def test_during_capture_an_unprepared_size_raises(monkeypatch) -> None:
    x, w, eps = arguments()
    plan = ops.bind("rms_norm", "n=256,x=fp32", "cpu").prepare([4])
    monkeypatch.setattr(bound_module, "_capturing", lambda: True)
    plan(x, w, eps, torch.empty_like(x))
    with pytest.raises(UnpreparedError, match=r"prepare\(\[33\]\)"):
        plan(*arguments(33), torch.empty(33, 256))


def test_an_empty_call_launches_nothing(monkeypatch) -> None:
    plan = ops.bind("rms_norm", "n=256,x=fp32", "cpu")
    monkeypatch.setattr(plan, "_runners", [pytest.fail] * 14, raising=False)
    plan(*arguments(0), torch.empty(0, 256))


def work_of(call: Callable[[], object]) -> tuple[int, int]:
    """Returns how many Python functions and how many bytecode instructions a call runs, its own lambda included.
    They are the same on every machine and under any load, which its time is not."""
    functions = instructions = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal functions, instructions
        functions += event == "call"
        instructions += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return functions, instructions


def test_dispatch_costs_a_few_python_calls() -> None:
    """A planned call takes 0.8 microseconds on an idle core of 2025, `torch.ops` 2.7 of which an operator with an
    empty body has 1.9. What it adds is Python, and is counted here."""
    x, w, eps = arguments(1, 64)
    out = torch.empty_like(x)
    plan = ops.bind("rms_norm", "n=64,x=fp32", "cpu").prepare([1])
    assert plan._runners[0] is not None
    plan._runners[0] = lambda *arguments: None
    through_plan, through_torch = (
        lambda: plan(x, w, eps, out),
        lambda: torch.ops.gristmill.rms_norm.out(x, w, eps, plan.handle, out),
    )
    through_plan(), through_torch()  # torch.ops looks an operator up in its first call
    functions, instructions = work_of(through_plan)
    assert functions <= 6 and instructions < 200
    functions, instructions = work_of(through_torch)
    assert functions <= 7 and instructions < 220
