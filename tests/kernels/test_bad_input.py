"""Invalid arguments to every operation of the registry give one clear error, or a result that the reference
agrees with.

Every argument of an example is mutated, one at a time: sizes, dimensions, dtype, device, memory order, values
of numbers; and the outputs of the `.out` overload too. No call may crash, raise an error of another kind, or
silently return something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.autotune import binding
from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.device import device_target
from gristmill.autotune.verify import kernel_arguments
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import BUCKETS, Plan, PlanEntry
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

REGISTRY = default_registry()
CPU = device_target("cpu", Policy())
OTHER_DTYPES = (
    torch.float64,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def kernel_for(op: Op, problem: Problem) -> Kernel:
    """Returns our C++ kernel where it takes the problem, else the torch kernel."""
    able = [
        k
        for k in REGISTRY.kernels_of(op.name)
        if k.language in ("cpp", "python")
        and k.accepts(problem) is None
        and not k.requires.check_hardware(CPU)
        and k.provider in ("gristmill", "torch")
    ]
    return sorted(able, key=lambda k: k.language != "cpp")[0]


def planned(op_name: str, static: Problem | str, *_: Any) -> BoundPlan:
    """Returns the plan of `ops.bind` with a kernel that counts as verified: verification takes seconds and is
    tested elsewhere."""
    op = REGISTRY.op(op_name)
    problem = op.at_bucket(op.problem(static) if isinstance(static, str) else static, 4)
    kernel = kernel_for(op, problem)
    layout = kernel.layouts[0] if kernel.layouts else None
    entries = tuple(
        PlanEntry(size, kernel.name, layout, dict(kernel.config(problem, CPU)), "priority", None)
        for size in (*BUCKETS, None)
    )
    plan = BoundPlan(op, problem, ops.resolver("cpu"), None)
    plan.adopt(Plan(op.name, op.static(problem), entries, ()))
    plan.handle = len(binding.PLANS) + 1
    binding.PLANS[plan.handle] = plan
    return plan


def tensors(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor)


def bad_tensors(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors that differ from `t` in one property."""
    for dim in range(t.dim()):
        yield f"dimension {dim} longer", torch.cat([t, t.narrow(dim, 0, 1)], dim) if t.shape[dim] else t
        if t.shape[dim]:
            yield f"dimension {dim} shorter", t.narrow(dim, 0, t.shape[dim] - 1).contiguous()
            yield f"dimension {dim} empty", t.narrow(dim, 0, 0).contiguous()
    yield "a dimension more", t[None]
    yield "a dimension more at the end", t[..., None]
    if t.dim():
        yield "a dimension less", t[0] if t.shape[0] else t.flatten()
        yield "a scalar", t.flatten()[0] if t.numel() else t.new_zeros(())
    for dtype in OTHER_DTYPES:
        if dtype != t.dtype:
            yield f"dtype {dtype}", t.to(dtype)
    yield "device meta", t.to("meta")
    if not t.is_floating_point() and t.dtype != torch.uint8:
        for value in (-7, 2**30):
            yield f"all {value}", torch.full_like(t, value)
            if t.numel():
                last = t.clone()
                last.view(-1)[-1] = value
                yield f"last {value}", last
    if t.dim() and t.numel():
        every_second = t.new_empty((*t.shape[:-1], 2 * t.shape[-1]))[..., ::2]
        yield "every other element", every_second.copy_(t)
        rows = t.new_empty((t.shape[0], 3, *t.shape[1:]))[:, 1]
        yield "rows apart", rows.copy_(t)
        if t.dim() > 1:
            yield "transposed", t.transpose(-1, -2).contiguous().transpose(-1, -2)
            yield "one row repeated", t[:1].expand_as(t)


def bad_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields arguments that differ from `value` in one property."""
    if isinstance(value, torch.Tensor):
        yield from bad_tensors(value)
    elif isinstance(value, list):
        yield "an empty list", []
        yield "a tensor less", value[:-1]
        yield "a tensor more", [*value, value[0]]
        for place, item in enumerate(value):
            for what, bad in bad_tensors(item):
                yield f"[{place}] {what}", [*value[:place], bad, *value[place + 1 :]]
    elif isinstance(value, bool):
        yield f"{not value}", not value
    elif isinstance(value, int):
        for other in (-1, 0, value + 1, value - 1, 2**40):
            if other != value:
                yield f"{other}", other
    elif isinstance(value, str):
        yield "nonsense", "nonsense"


def fresh(arguments: list[Any]) -> list[Any]:
    """Returns a copy of every tensor with the same strides."""

    def copy(argument: Any) -> Any:
        if isinstance(argument, list):
            return [copy(item) for item in argument]
        if not tensors(argument) or argument.device.type == "meta":
            return argument
        duplicate = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
        if 0 in argument.stride():
            return (
                argument.clone(memory_format=torch.preserve_format) if argument.is_contiguous() else argument
            )
        return duplicate.copy_(argument)

    return [copy(argument) for argument in arguments]


def verdict(
    op: Op, call: Callable[[list[Any]], Any], arguments: list[Any], neutral: list[Any] | None
) -> str | None:
    """Returns what is wrong with the outcome of a call, or None. neutral: the arguments of the reference
    (unpacked weights)."""
    call_arguments = fresh(arguments)
    try:
        actual = call(call_arguments)
    except (ValueError, TypeError) as error:
        message = str(error)
        return (
            None
            if len(message) > 20 and "object has no attribute" not in message
            else f"says only {message!r}"
        )
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
        return f"{type(error).__name__}: {str(error)[:150]}"
    everything = [t for a in call_arguments for t in (a if isinstance(a, list) else [a]) if tensors(t)]
    if any(t.is_meta for t in (*everything, *_tuple(actual))):
        return None if all(t.is_meta for t in everything) else "answered for tensors of two devices"
    expected = fresh(arguments if neutral is None else neutral)
    try:
        reference = op.reference(*expected)
    except Exception as error:  # noqa: BLE001
        return f"answered, where the reference raises {type(error).__name__}: {str(error)[:100]}"
    pairs = list(zip(_tuple(actual), _tuple(reference), strict=True))
    pairs += [
        (a, b)
        for a, b, p in zip(call_arguments, expected, op.parameters, strict=True)
        if p.mutable and tensors(a) and p.name != "workspace"
    ]
    # The result for tokens that no sequence owns is undefined.
    names = [p.name for p in op.parameters]
    owned = int(expected[names.index("query_start")][-1]) if "query_start" in names else None
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"answered {tuple(a.shape)} {a.dtype}, the reference {tuple(b.shape)} {b.dtype}"
        if op.name != "sample" and not torch.allclose(
            a[:owned].double(), b[:owned].double(), rtol=0.05, atol=0.05, equal_nan=True
        ):
            return "answered with other values than the reference"
    return None


def _tuple(value: Any) -> tuple[Any, ...]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def example(op: Op) -> Problem:
    """Returns a small problem with more than one row, with dense weights if the operation packs weights."""
    for text in op.examples:
        problem = op.problem(text)
        sizes = [problem.integer(axis.name) for axis in op.axes if axis.kind == "int" and axis.dynamic]
        if min(sizes, default=2) > 1:
            return problem
    raise AssertionError(op.name)


def mutations(op: Op, arguments: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    for place, parameter in enumerate(op.parameters):
        for what, bad in bad_values(arguments[place]):
            yield f"{parameter.name}: {what}", [*arguments[:place], bad, *arguments[place + 1 :]]


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch, policy_file) -> None:
    policy_file()
    monkeypatch.setattr(binding, "bind", planned)
    monkeypatch.setattr(binding, "_AUTOMATIC", {})


def report(op: Op, bad_calls: list[str]) -> None:
    assert not bad_calls, f"{op.name}: {len(bad_calls)} bad calls\n" + "\n".join(bad_calls[:400])


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_calls_without_a_plan(op: Op) -> None:
    problem, function = example(op), getattr(ops, op.name)
    arguments = op.inputs(problem, 0, "cpu")
    if op.pack is not None:
        dense = next(k for k in REGISTRY.kernels_of(op.name) if k.layouts == ("dense_v1",))
        arguments = kernel_arguments(op, dense, arguments)
    assert verdict(op, lambda a: function(*a), arguments, None) is None
    bad_calls = []
    for what, mutated in mutations(op, arguments):
        wrong = verdict(op, lambda a: function(*a), mutated, None)
        if wrong:
            bad_calls.append(f"  {what}: {wrong}")
    report(op, bad_calls)


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_calls_with_a_plan(op: Op) -> None:
    """The same through a bound plan, where only the plan's guard checks a call; and bad outputs."""
    problem, function = example(op), getattr(ops, op.name)
    plan = planned(op.name, op.static(problem))
    kernel = kernel_for(op, op.at_bucket(op.static(problem), 4))
    neutral = op.inputs(problem, 0, "cpu")
    arguments = kernel_arguments(op, kernel, neutral)
    packed = op.pack is not None
    assert verdict(op, lambda a: function(*a, plan=plan), arguments, neutral if packed else None) is None
    bad_calls = []
    for what, mutated in mutations(op, arguments):
        expected = None
        if packed:  # the reference takes the unpacked weight and the other, mutated arguments
            expected = [
                n if isinstance(a, list) else m for n, m, a in zip(neutral, mutated, arguments, strict=True)
            ]
        wrong = verdict(op, lambda a: function(*a, plan=plan), mutated, expected)
        if wrong:
            bad_calls.append(f"  {what}: {wrong}")
    outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in op.like(*arguments)]
    for place, name in enumerate(op.outputs):
        for what, bad in bad_tensors(outputs[place]):
            mutated_outputs = [*outputs[:place], bad, *outputs[place + 1 :]]
            out = mutated_outputs[0] if len(mutated_outputs) == 1 else tuple(mutated_outputs)
            wrong = verdict(
                op,
                lambda a, out=out: function(*a, plan=plan, out=out),
                arguments,
                neutral if packed else None,
            )
            if wrong:
                bad_calls.append(f"  out {name}: {what}: {wrong}")
    report(op, bad_calls)


def test_a_guard_that_forgets_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep fails on two guards that once were in use: one ignores a dtype, one asks a scalar for its
    width."""
    op = REGISTRY.op("layer_norm")
    problem = example(op)
    arguments = op.inputs(problem, 0, "cpu")
    plan = planned("layer_norm", op.static(problem))

    def faults(guard: Callable[..., int]) -> str:
        monkeypatch.setattr(plan, "_guard", guard)
        # Only wider elements: without a guard, narrower ones would be read past their end.
        verdicts = [
            verdict(op, lambda a: ops.layer_norm(*a, plan=plan), bad, None)
            for what, bad in mutations(op, arguments)
            if what.endswith(("float64", "int64"))
        ]
        return "\n".join(filter(None, verdicts))

    assert faults(op.guard(plan.static)) == ""
    rows = arguments[0].shape[0]
    assert "other values than the reference" in faults(lambda call: min(rows, call.x.shape[0]))

    def asks(call: Any) -> int:
        raise KeyError(call.x.dim())

    assert "KeyError" in faults(asks)
