"""Overloads of the torch operators under torch.compile with Inductor: every operation, memory of outputs,
plans with several layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._library._out_variant import to_out_variant

from gristmill import LinearWeight, ops, quantize
from gristmill.autotune.operators import writer
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry import Op, default_registry
from gristmill.kernel_registry.plan import Plan, PlanEntry

REGISTRY = default_registry()
TAGGED = {
    "activation",
    "combine",
    "grouped_topk",
    "logprobs",
    "merge_attention_states",
    "mla_attention",
    "permute",
    "process_logits",
    "rms_norm",
    "route",
    "gelu_and_mul",
    "silu_and_mul",
    "varlen_attention",
}
"""Operations whose outputs Inductor can allocate. It would call the overload of the others with arguments out
of order."""


@pytest.fixture(autouse=True)
def unverified(policy_file, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """All kernels count as verified, and graphs are compiled anew."""
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()


def arguments_of(op: Op, text: str) -> list[Any]:
    """Returns the arguments of a problem, with dense weights and without optional arguments that are written
    in place."""
    problem = op.problem(text)
    inputs = op.inputs(problem, 1, "cpu")
    dense = [[a.dequantize(problem.text("x"))] if type(a).__name__ == "QuantTensor" else a for a in inputs]
    absent = [p.mutable and "?" in p.type for p in op.parameters]
    return [None if is_absent else a for is_absent, a in zip(absent, dense, strict=True)]


def example(op: Op) -> list[Any]:
    """Returns the arguments of the first example that has elements, dense weights and no e4m3, which torch's own check of
    schemas cannot compute with."""
    schemes = [axis.name for axis in op.axes if axis.kind == "scheme"]
    for text in op.examples:
        problem = op.problem(text)
        if not schemes or problem.text(schemes[0]) in ("bf16", "fp16", "fp32"):
            inputs = arguments_of(op, text)
            if all(
                a.numel() and a.dtype is not torch.float8_e4m3fn
                for a in inputs
                if isinstance(a, torch.Tensor)
            ):
                return inputs
    raise LookupError(op.name)


CALLS = {name: example(op) for name, op in REGISTRY.ops.items()}


def clones(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [clones(item) for item in value] if isinstance(value, list | tuple) else value


def everything(calls: dict[str, list[Any]]) -> list[Any]:
    """Calls every operation once. Returns their results and the tensors that they may have written to."""
    results = [getattr(ops, name)(*arguments) for name, arguments in calls.items()]
    return [results, [a for arguments in calls.values() for a in arguments if isinstance(a, torch.Tensor)]]


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_operation_compiles_with_inductor() -> None:
    # Here, since it takes seconds, which other processes of a run spare.
    from torch._inductor.utils import run_and_get_code

    expected = everything(clones_of(CALLS))
    actual, code = run_and_get_code(torch.compile(everything, fullgraph=True), clones_of(CALLS))
    assert_equal(actual, expected)
    for name in CALLS:
        assert f"torch.ops.gristmill.{name}." in code[0]
    assert {name for name in CALLS if f"gristmill.{name}.planned_out" in code[0]} == TAGGED


def clones_of(calls: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: clones(arguments) for name, arguments in calls.items()}


def with_lse(q: torch.Tensor, rest: list[Any], lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.varlen_attention(q, *rest, lse=lse), lse


def test_lse_and_keys_that_are_given_compile_too() -> None:
    q, *rest = CALLS["varlen_attention"][:-3]
    expected = with_lse(q, rest, torch.full(q.shape[:2], float("nan"), dtype=torch.float32))
    actual = torch.compile(with_lse, fullgraph=True)(
        q, rest, torch.full(q.shape[:2], float("nan"), dtype=torch.float32)
    )
    assert_equal(actual, expected)
    op = REGISTRY.op("rotary_embedding")
    inputs = op.inputs(op.problem("t=5,hq=4,hk=2,d=64,rot=64"), 1, "cpu")
    assert inputs[1] is not None
    eager, compiled = clones(inputs), clones(inputs)
    ops.rotary_embedding(*eager)
    torch.compile(lambda *a: ops.rotary_embedding(*a), fullgraph=True)(*compiled)
    assert_equal(eager[:2], compiled[:2])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_opcheck_of_every_overload(name: str) -> None:
    op, overloads = REGISTRY.op(name), getattr(torch.ops.gristmill, name)
    absent = [p.name for p in op.parameters if p.mutable and "?" in p.type]
    inputs = [a for p, a in zip(op.parameters, CALLS[name], strict=True) if p.name not in absent]
    if not op.outputs:
        inputs = CALLS[name]
    torch.library.opcheck(overloads.default, clones(inputs), test_utils=("test_schema", "test_faketensor"))
    assert ("planned_out" in overloads.overloads()) == (name in TAGGED)
    if name in TAGGED:
        assert to_out_variant(overloads.planned) is overloads.planned_out
        outs = {
            out: torch.empty(shape, dtype=dtype)
            for out, (shape, dtype) in zip(op.outputs, op.like(*CALLS[name]), strict=True)
        }
        expected = overloads.default(*clones(inputs))
        overloads.planned_out(*clones(inputs), 0, **outs)
        assert_equal(list(outs.values()), list(expected) if len(outs) > 1 else [expected])


def two_layouts() -> tuple[LinearWeight, Any]:
    """Returns a weight in two layouts and its plan: one row goes to the kernel of one layout, more rows to
    that of the other."""
    weight = LinearWeight.pack(quantize(torch.randn(48, 256), "int4_g128"), ["plain_v1", "cpu_rows16_v1"])
    op = REGISTRY.op("linear")
    static = op.static(op.problem(weight.problem("fp32")))
    plan = ops.bind("linear", static, "cpu", layouts=weight.layouts)
    entries = []
    for m_max, kernel, layout in (
        (1, "linear_cpu", "cpu_rows16_v1"),
        *((m, "linear_dequant_torch", "plain_v1") for m in (2, 4, 8, 16)),
    ):
        config = REGISTRY.kernel("linear", kernel).config(op.at_bucket(static, m_max), plan.resolver.target)
        entries.append(PlanEntry(m_max, kernel, layout, dict(config), "priority", None))
    return weight, plan.adopt(Plan("linear", static, tuple(entries), tuple(weight.layouts)))


def test_the_operator_chooses_among_the_layouts_of_its_plan() -> None:
    """A traced graph contains one call, which is correct for every size."""
    weight, plan = two_layouts()
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    tensors = weight.tensors()
    layer = torch.compile(
        lambda x: ops.linear(x, tensors, n=weight.n, plan=plan), backend=backend, dynamic=True, fullgraph=True
    )
    plain = replace(weight, packed={"plain_v1": weight.packed["plain_v1"]})
    single_layout = ops.bind("linear", plain.problem("fp32"), "cpu", layouts=plain.layouts)
    for rows in (1, 2, 5, 16):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(
            layer(x), ops.linear(x, plain.tensors(), n=48, plan=single_layout), rtol=1e-4, atol=1e-4
        )
    calls = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert len(graphs) <= 2  # torch specializes a first size of 1
    assert [str(node.target) for node in calls] == ["gristmill.linear.default"] * len(graphs)


@pytest.mark.parametrize("rows", (1, 5))
def test_other_tensors_than_those_of_the_layouts_are_refused(rows: int) -> None:
    weight, plan = two_layouts()
    x = torch.randn(rows, 256)
    for tensors in (weight.tensors("plain_v1"), weight.tensors("cpu_rows16_v1"), [*weight.tensors(), x]):
        with pytest.raises(ValueError, match="weight must be the tensors of cpu_rows16_v1 and plain_v1"):
            ops.linear(x, tensors, n=48, plan=plan)
    parts = [weight.tensors("cpu_rows16_v1"), weight.tensors("plain_v1")]
    for layout in range(2):  # one layout has too few codes: the guard checks those of the layout that runs
        short = [list(part) for part in parts]
        short[layout][0] = short[layout][0].flatten()[:64].clone()
        if layout == (0 if rows == 1 else 1):
            with pytest.raises(ValueError, match="weight"):
                ops.linear(x, [t for part in short for t in part], n=48, plan=plan)


def test_a_writer_gives_what_is_not_named_its_default() -> None:
    op = REGISTRY.op("linear")
    x, weight, out = torch.randn(3, 64), torch.randn(16, 64), torch.empty(3, 16)
    writer(op, "x", "weight", "n")(x, [weight], 16, 0, out)
    torch.testing.assert_close(out, x @ weight.T, atol=1e-4, rtol=1e-4)
    with pytest.raises(
        TypeError, match="linear takes weight, x, may take bias, .*and writes out; got x, colour"
    ):
        writer(op, "x", "colour")


def test_a_writer_is_one_operator_in_a_traced_graph() -> None:
    write = writer(REGISTRY.op("linear"), "x", "weight", "bias", "n")
    graphs = []

    def seen(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    @torch.compile(backend=seen, fullgraph=True)
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(3, 16)
        write(x, [weight], None, 16, 0, out)
        return out

    x, weight = torch.randn(3, 64), torch.randn(16, 64)
    torch.testing.assert_close(layer(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)
    assert sum("linear" in name for name in graphs[0]) == 1 and len(graphs) == 1
