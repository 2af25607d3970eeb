"""Operators: opcheck, torch.compile, dynamic shapes, refusals, and the cost of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch

from gristmill import nn, ops
from gristmill.autotune import bound as bound_module
from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.captures import only_what_has_run
from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.plan import bucket_index
from gristmill.quant.rtn import quantize


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


def test_a_plan_of_another_operation_is_refused() -> None:
    x, w, eps = arguments()
    plan = ops.bind("rms_norm", "n=256,x=fp32", "cpu")
    with pytest.raises(ValueError, match="rms_norm planned for n=256,x=fp32: got a LayerNormCall"):
        ops.layer_norm(x, w, None, eps, plan=plan)
    with pytest.raises(ValueError, match="got a LayerNormCall"):
        torch.ops.gristmill.layer_norm.out(x, w, None, eps, None, plan.handle, torch.empty_like(x))


def test_a_released_plan_is_refused() -> None:
    x, w, eps = arguments(n=48)
    plan = ops.bind("rms_norm", "n=48,x=fp32", "cpu")
    ops.release(plan)
    with pytest.raises(ValueError, match="the plan was released"):
        ops.rms_norm(x, w, eps, plan=plan)


@pytest.mark.parametrize("size", [-1, 1.5, "a"])
def test_prepare_refuses_what_is_no_size(size: Any) -> None:
    with pytest.raises(ValueError, match="sizes are integers of at least 0, got"):
        ops.bind("rms_norm", "n=256,x=fp32", "cpu").prepare([size])


def test_out_shares_no_memory_with_arguments() -> None:
    rows, (x, w, eps) = torch.randn(5, 256), arguments()
    expected = ops.rms_norm(rows[:4], w, eps)
    with pytest.raises(ValueError, match="rms_norm: out shares memory with x"):
        ops.rms_norm(rows[:4], w, eps, out=rows[1:])
    with pytest.raises(ValueError, match="rms_norm: out shares memory with x"):
        ops.rms_norm(rows[:4, :128], w[:128], eps, out=rows[1:, :128])
    with pytest.raises(ValueError, match="rms_norm: out shares memory with weight"):
        ops.rms_norm(x[:1], w, eps, out=w[None])
    square = torch.randn(256, 256)
    with pytest.raises(ValueError, match="linear: out shares memory with x"):
        ops.linear(x, square, out=x)
    with pytest.raises(ValueError, match="linear: out shares memory with weight"):
        ops.linear(square.clone(), square, out=square)
    halves = torch.randn(4, 512)
    out = ops.rms_norm(halves[:, :256], w, eps, out=halves[:, 256:])
    assert torch.equal(out, ops.rms_norm(halves[:, :256].clone(), w, eps))
    assert torch.equal(ops.rms_norm(rows[:4], w, eps, out=rows[:4]), expected)


def test_two_outputs_share_no_memory() -> None:
    a, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    with pytest.raises(ValueError, match="merge_attention_states: lse shares memory with out"):
        memory = torch.empty(2, 3, 8)
        ops.merge_attention_states(a, lse, a, lse, out=(memory, memory.view(-1)[:6].view(2, 3)))


@pytest.mark.parametrize("out", [3, (), [torch.empty(4, 256)] * 2])
def test_other_outputs_than_the_operation_has_are_refused(out: Any) -> None:
    x, w, eps = arguments()
    with pytest.raises(
        TypeError, match=r"rms_norm: out must be a tensor \(out\), got (int|0 of them|2 of them)"
    ):
        ops.rms_norm(x, w, eps, out=out)


def test_a_quantized_weight_is_packed_first() -> None:
    weight = quantize(torch.randn(32, 64), "int4_g32")
    with pytest.raises(
        TypeError,
        match="linear: weight must be a dense tensor or.*got QuantTensor; gristmill.LinearWeight.pack",
    ):
        ops.linear(torch.randn(2, 64), weight)


def test_arguments_may_require_gradients() -> None:
    x, weight = torch.randn(3, 64), torch.nn.Parameter(torch.randn(32, 64))
    expected = x @ weight.detach().T
    torch.testing.assert_close(ops.linear(x, weight).detach(), expected)
    plan, out = (
        ops.bind("linear", "n=32,k=64,x=fp32,w=fp32", "cpu", layouts=frozenset({"dense_v1"})),
        torch.empty(3, 32),
    )
    plan(x, [weight], out=out)
    torch.testing.assert_close(out, expected)
    assert torch.is_grad_enabled() and not out.requires_grad


def test_a_backward_pass_is_refused_not_wrong() -> None:
    layer = torch.nn.Linear(64, 64)
    quantized = nn.Linear.from_float(torch.nn.Linear(64, 64), "int8_ch")
    x, weight, rows = torch.randn(3, 64), torch.ones(64), torch.arange(3)
    calls = {
        "rms_norm": lambda y: ops.rms_norm(y, weight, 1e-5),
        "logprobs": lambda y: ops.logprobs(y, rows, rows)[0],  # beside ids, which have none
        "linear": quantized,
    }
    for name, call in calls.items():
        y = layer(x)
        with pytest.raises(NotImplementedError, match=f"{name} has no derivative: .* torch.no_grad"):
            (y.sum() + call(y).sum()).backward()
    with pytest.raises(NotImplementedError, match="rms_norm has no derivative"):
        torch.func.grad(lambda y: ops.rms_norm(y, weight, 1e-5).sum())(x)
    torch._dynamo.reset()
    traced = torch.compile(lambda y: quantized(layer(y)), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(x), quantized(layer(x)))
    with torch.no_grad():
        assert not ops.rms_norm(layer(x), weight, 1e-5).requires_grad


def test_during_capture_an_unprepared_size_raises(monkeypatch) -> None:
    x, w, eps = arguments()
    plan = ops.bind("rms_norm", "n=256,x=fp32", "cpu").prepare([4])
    monkeypatch.setattr(bound_module, "_capturing", lambda: True)
    plan(x, w, eps, torch.empty_like(x))
    with pytest.raises(UnpreparedError, match=r"prepare\(\[33\]\)"):
        plan(*arguments(33), torch.empty(33, 256))


def test_a_kernel_that_has_not_run_can_be_refused_during_capture(monkeypatch) -> None:
    """What its first run does once would become part of the graph. A run in a capture is none."""
    monkeypatch.setattr(
        BoundPlan, "_code", lambda plan, index, *_: (index,)
    )  # each bucket has a kernel of its own
    plan = ops.bind("rms_norm", "n=272,x=fp32", "cpu").prepare([4, 64])
    x, w, eps = arguments(4, 272)
    capturing = [True]
    monkeypatch.setattr(bound_module, "_capturing", lambda: capturing[0])
    with only_what_has_run():
        for _ in range(2):
            with pytest.raises(UnpreparedError, match=r"rms_norm n=272.*sizes up to 4 has not run"):
                plan(x, w, eps, torch.empty_like(x))
    plan(x, w, eps, torch.empty_like(x))
    with only_what_has_run(), pytest.raises(UnpreparedError, match="has not run"):
        plan(x, w, eps, torch.empty_like(x))
    capturing[0] = False
    with only_what_has_run():
        plan(x, w, eps, torch.empty_like(x))
        capturing[0] = True
        out = torch.full_like(x, torch.nan)
        plan(x, w, eps, out)
        with pytest.raises(UnpreparedError, match="sizes up to 64 has not run"):
            plan(*arguments(64, 272), torch.empty(64, 272))
    torch.testing.assert_close(out, ops.rms_norm(x, w, eps))


def test_buckets_of_one_kernel_and_configuration_run_the_same_code() -> None:
    """A chain of torch's operations chooses by sizes itself."""
    plan = ops.bind("rms_norm", "n=288,x=fp32", "cpu").prepare([4, 64])
    one, other = bucket_index(4), bucket_index(64)
    assert not plan.has_run(one) and not plan.has_run(bucket_index(128))
    entry = plan.entry(64)
    for language, shared in (("cuda", True), ("python", False)):
        assert (plan._code(one, language, entry) == plan._code(other, language, entry)) == shared
    configured = replace(entry, config={**entry.config, "tile": 7})
    assert plan._code(one, "cuda", entry) != plan._code(one, "cuda", configured)
    plan(*arguments(3, 288), torch.empty(3, 288))
    assert plan.has_run(one)


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
