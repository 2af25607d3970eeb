"""Operators: opcheck, torch.compile, dynamic shapes, refusals, and the cost of a call."""

from __future__ import annotations

import time
from collections.abc import Callable

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


def costs(*calls: Callable[[], object], rounds: int = 80, repeats: int = 250) -> list[float]:
    """Returns the least microseconds of each call over many short alternating rounds: its cost without
    disturbance."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            best[index] = min(best[index], time.perf_counter() - start)
    return [seconds / repeats * 1e6 for seconds in best]


def test_dispatch_costs_a_few_python_calls() -> None:
    """Bounds the ratio to calls whose cost is about the same on any machine: an operator with an empty Python
    body, a function call."""
    x, w, eps = arguments(1, 64)
    out = torch.empty_like(x)
    plan = ops.bind("rms_norm", "n=64,x=fp32", "cpu").prepare([1])
    kernel = plan._runners[0]
    assert kernel is not None
    plan._runners[0] = lambda *arguments: None
    library = torch.library.Library("gristmill_test", "DEF")
    library.define("empty(Tensor x, Tensor w, float eps, int plan, Tensor(a!) out) -> ()")
    library.impl("empty", lambda *arguments: None, "CompositeExplicitAutograd")
    bare, multiply, through_plan, through_torch = costs(
        lambda: torch.ops.gristmill_test.empty.default(x, w, eps, 1, out),
        lambda: torch.mul(x, x, out=out),
        lambda: plan(x, w, eps, out),
        lambda: torch.ops.gristmill.rms_norm.out(x, w, eps, plan.handle, out),
    )
    print(
        f"plan {through_plan:.2f} us, torch.ops {through_torch:.2f} us, empty operator {bare:.2f} us, mul {multiply:.2f} us"
    )
    # On an idle core of 2025: plan 0.8, torch.ops 2.7, empty operator 1.9, mul 1.0 microseconds.
    assert through_plan < 0.8 * bare
    assert through_torch < 2.2 * bare
