"""Nothing depends on torch's default dtype, which hosts change while they load a model (vLLM sets it to the
model's dtype)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gristmill
from gristmill import LinearWeight, SamplingParams, ops
from gristmill.autotune.verify import verify
from gristmill.kernel_registry import default_registry
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import pack, quantize_activation, unpack
from gristmill.quant.gptq import gptq, search_scales
from tests.kernels.running import runnables
from tests.runtime.oracle import LLAMA, MODELS

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = default_registry()
MADE_ON_A_GPU = ("humming_v1", "tinygemm_v1")
CREATORS = {"empty", "eye", "full", "linspace", "normal", "ones", "rand", "randn", "zeros"}


@pytest.fixture
def bf16_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def under(dtype: torch.dtype, function: Any, *arguments: Any) -> Any:
    """Returns the result of `function` under a default dtype."""
    torch.set_default_dtype(dtype)
    try:
        return function(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def leaves(value: Any) -> list[Any]:
    """Returns the tensors and numbers of a result, including those of a QuantTensor or a Packed."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [leaf for name in value.__dataclass_fields__ for leaf in leaves(getattr(value, name))]
    return [value]


def assert_same(first: Any, second: Any) -> None:
    first_leaves, second_leaves = leaves(first), leaves(second)
    assert len(first_leaves) == len(second_leaves) > 0
    for a, b in zip(first_leaves, second_leaves, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape
            if a.numel():
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        else:
            assert a == b or a is b or a != a


def assert_independent(function: Any, *arguments: Any) -> None:
    """Results are bitwise equal under both default dtypes."""
    assert_same(under(torch.bfloat16, function, *arguments), under(torch.float32, function, *arguments))


def undeclared(source: str) -> list[str]:
    """Returns the calls that create floats without stating a dtype."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in CREATORS}
        and not {"dtype", "out", None} & {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize(
    "folder", ["quant", "kernels", "autotune", "runtime", "serve", "tools", "integrations", "src/gristmill"]
)
def test_floats_are_created_in_a_stated_dtype(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files and {str(f): found for f in files if (found := undeclared(f.read_text("utf-8")))} == {}


def test_a_planted_default_is_found() -> None:
    assert undeclared("a = torch.zeros(3)\nb = torch.rand(2, dtype=d)\nc = torch.empty(3, **k)") == [
        "torch.zeros(3)"
    ]


@pytest.mark.parametrize("name", sorted(REGISTRY.ops))
def test_inputs_and_references(name: str) -> None:
    op = REGISTRY.op(name)
    for text in op.examples:
        problem = op.problem(text)
        assert_independent(op.inputs, problem, 3, "cpu")
        arguments = op.inputs(problem, 3, "cpu")
        copies = [[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments] for _ in range(2)]
        assert_same(
            [under(torch.bfloat16, op.reference, *copies[0]), copies[0]],
            [under(torch.float32, op.reference, *copies[1]), copies[1]],
        )


@pytest.mark.parametrize("name", sorted(REGISTRY.ops))
def test_kernels(name: str) -> None:
    """All kernels except Triton's, because the interpreter uses numpy."""
    op = REGISTRY.op(name)
    for runnable in runnables(name):
        if runnable.kernel.language == "triton":
            continue
        accepted = [p for p in map(op.problem, op.examples) if runnable.kernel.accepts(p) is None]
        for problem in accepted[1:3]:
            config = runnable.kernel.config(problem, runnable.target)
            assert_independent(verify, op, runnable.kernel, config, problem, "cpu")


@pytest.mark.parametrize("scheme", ALL_WEIGHT_SCHEMES)
def test_quantizing_and_packing(scheme: str) -> None:
    weight = torch.randn(48, 256)
    assert_independent(gristmill.quantize, weight, scheme)
    quantized = gristmill.quantize(weight, scheme)
    assert_independent(lambda: quantized.dequantize())
    for layout in REGISTRY.layouts.values():
        if layout.name not in MADE_ON_A_GPU and layout.accepts(QuantScheme.parse(scheme)):
            assert_independent(lambda layout=layout: pack(quantized, layout).tensors)
            assert_independent(lambda layout=layout: unpack(pack(quantized, layout)))


def test_act_order_gptq_and_activations() -> None:
    weight, order = torch.randn(32, 256), torch.randperm(256) // 128
    assert_independent(lambda: gristmill.quantize(weight, "int4_g128", g_idx=order.int()))
    start, hessian = gristmill.quantize(weight, "int4_g128"), torch.eye(256) + 0.1
    assert_independent(lambda: gptq(weight, hessian, start))
    assert_independent(lambda: search_scales(weight, hessian, start))
    for format in (
        "fp8",
        "fp8_token",
        "fp8_g128",
        "int8_token",
        "int8_g32",
        "int8_g128",
        "mxfp8",
        "mxfp4",
        "nvfp4",
    ):
        assert_independent(quantize_activation, weight, format)


@pytest.mark.usefixtures("bf16_default")
def test_operators_and_verification(policy_file) -> None:
    policy_file()
    weight = LinearWeight.pack(
        gristmill.quantize(torch.randn(64, 256, dtype=torch.float32), "int4_g128"), ["plain_v1"]
    )
    plan = ops.bind("linear", weight.problem("bf16"), "cpu", layouts=weight.layouts).prepare([4])
    x = torch.randn(4, 256)
    assert ops.linear(x, weight.tensors(), n=64, plan=plan).dtype is torch.bfloat16


def test_a_model(policy_file) -> None:
    policy_file()

    def ids() -> list[int]:
        model = gristmill.LLM(MODELS / LLAMA, quant="int4_g128", device="cpu")
        return model.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=6))[0].token_ids

    assert_independent(ids)
