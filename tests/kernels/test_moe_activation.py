"""Activations of moe beside silu(gate) · up: agreement with loops in float64, odd shapes, workspaces, refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.autotune.verify import kernel_arguments, run_guarded, run_reference
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.moe.moe import _activated
from gristmill.kernels.moe.moe import op as moe
from tests.calls import make_call
from tests.kernels.running import Runnable, runnables

SERVED = [each for each in runnables("moe") if {"activation", "gated"} <= {*each.kernel.supports}]
FORMS = [(name, gated) for name in _activated.FUNCTIONS for gated in (True, False)]
TORCH = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


def test_every_kernel_but_those_of_a_device_has_them() -> None:
    names = {each.kernel.name for each in SERVED}
    assert {"moe_chain_torch", "moe_chain_triton", "moe_chain_w_triton", "moe_cpu"} <= names
    registry = default_registry()
    problem = moe.OP.problem("m=4,top_k=2,e=4,h=128,i=128,w=int4_g128,activation=relu2,gated=false")
    refused = {k.name: k.accepts(problem) for k in registry.kernels_of("moe") if k.name not in names}
    assert "moe_sm90" in refused and "moe_w8a8_sm90" in refused
    assert all(reason and "activation" in reason for reason in refused.values()), refused


@pytest.mark.parametrize(("name", "gated"), FORMS)
def test_reference_is_the_plain_loop(name: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    experts, hidden, inner = 4, 19, 11
    rows = 2 * inner if gated else inner
    x = torch.randn(7, hidden, generator=generator)
    w13 = torch.randn(experts, rows, hidden, generator=generator) / 4
    w2 = torch.randn(experts, hidden, inner, generator=generator) / 3
    bias = torch.randn(experts, rows, generator=generator)
    ids = torch.randint(0, experts + 1, (7, 2), generator=generator).int()  # one of another rank
    weights = torch.rand(7, 2, generator=generator)
    out = moe.reference(x, weights, ids, w13, w2, w13_bias=bias, activation=name, gated=gated)
    expected = torch.zeros(7, hidden, dtype=torch.float64)
    for t in range(7):
        for k in range(2):
            e = int(ids[t, k])
            if e < experts:
                z = w13[e].double() @ x[t].double() + bias[e].double()
                h = TORCH[name](z[:inner]) * z[inner:] if gated else TORCH[name](z)
                expected[t] += weights[t, k].double() * (w2[e].double() @ h)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def _error(implementation: Runnable, text: str, change: Any = None) -> float:
    """The error of a kernel on a problem, over its tolerance; with `change` of the outputs."""
    op, kernel = implementation.op, implementation.kernel
    problem = op.problem(text)
    arguments = op.inputs(problem, 6, "cpu")
    config = kernel.config(problem, implementation.target)
    outputs, trespass = run_guarded(op, kernel, config, kernel_arguments(op, kernel, arguments))
    assert not trespass
    assert op.error is not None
    if change is not None:
        change(outputs[0])
    return op.error(problem, arguments, outputs, run_reference(op, arguments)) / op.tolerance(problem).limit


def _scheme(implementation: Runnable) -> str:
    name = implementation.kernel.name
    return "fp8_block.fp8_g128" if "_w8a8_" in name else "mxfp4" if "_w_" in name else "bf16"


def _shape_fits(implementation: Runnable, shape: str, forms: list[tuple[str, bool]]) -> None:
    for name, gated in forms:
        form = f"activation={name},gated={str(gated).lower()},epilogue=w13_bias+w2_bias"
        assert _error(implementation, f"{shape},top_k=3,e=7,w={_scheme(implementation)},{form}") <= 1


@pytest.mark.parametrize("implementation", SERVED, ids=str)
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ("m=0,h=32,i=32", ("relu2", False)),
        ("m=1,h=96,i=160", ("gelu_tanh", True)),
        ("m=70,h=40,i=32", ("relu2", False)),
    ],
)
def test_odd_shapes(implementation: Runnable, shape: str, form: tuple[str, bool]) -> None:
    _shape_fits(implementation, shape, [form])


@pytest.mark.parametrize("implementation", SERVED, ids=str)
def test_forms(implementation: Runnable) -> None:
    """All in torch and C++; a third of them per chain in Triton's interpreter, so that the chains together have all."""
    is_triton = implementation.kernel.language == "triton"
    of_triton = [each for each in SERVED if each.kernel.language == "triton"]
    forms = FORMS[of_triton.index(implementation) % 3 :: 3] if is_triton else FORMS
    assert len(of_triton) >= 3 or not is_triton
    _shape_fits(implementation, "m=7,h=64,i=35", forms)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", SERVED, ids=str)
def test_every_form(implementation: Runnable) -> None:
    _shape_fits(implementation, "m=7,h=64,i=35", FORMS)


@pytest.mark.parametrize("implementation", SERVED, ids=str)
def test_a_workspace_and_unstated_sizes(implementation: Runnable) -> None:
    """With the workspace that a kernel asks for, the bits are those without one; dense weights need no `inter`."""
    op, kernel = implementation.op, implementation.kernel
    for name, gated in (("gelu", True), ("relu2", False)):
        form = f"activation={name},gated={str(gated).lower()}"
        problem = op.problem(f"m=9,top_k=2,e=3,h=64,i=40,w={_scheme(implementation)},{form}")
        config = kernel.config(problem, implementation.target)
        call = make_call(
            "moe", *kernel_arguments(op, kernel, op.inputs(problem, 7, "cpu")), torch.empty(9, 64).bfloat16()
        )
        kernel.load()(config, call)
        space = torch.full((kernel.workspace(problem, config).bytes,), 255, dtype=torch.uint8)
        again = call.replace(workspace=space, out=torch.empty_like(call.out))
        if call.w13[0].dim() == 3 and not kernel.name.endswith("_cpu"):
            again = again.replace(inter=0)
        kernel.load()(config, again)
        assert torch.equal(call.out, again.out)
        if space.numel():
            with pytest.raises(ValueError):
                kernel.load()(config, call.replace(workspace=space[: space.numel() // 2]))


@pytest.mark.parametrize("implementation", [i for i in SERVED if i.kernel.batch_invariant], ids=str)
def test_rows_do_not_depend_on_the_batch(implementation: Runnable) -> None:
    op, kernel = implementation.op, implementation.kernel
    problem = op.problem(f"m=12,top_k=2,e=3,h=96,i=64,w={_scheme(implementation)},activation=gelu_tanh")
    arguments = kernel_arguments(op, kernel, op.inputs(problem, 8, "cpu"))
    config, full = kernel.config(problem, implementation.target), torch.empty(12, 96, dtype=torch.bfloat16)
    kernel.load()(config, make_call("moe", *arguments, full))
    for m in (1, 5):
        part = torch.empty_like(full[:m])
        kernel.load()(
            config, make_call("moe", *(a[:m].contiguous() for a in arguments[:3]), *arguments[3:], part)
        )
        assert torch.equal(part, full[:m])


def test_refusals() -> None:
    x, weights, ids = torch.randn(3, 16), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    w13, w2 = torch.randn(2, 8, 16), torch.randn(2, 16, 8)
    given = (x, weights, ids, [w13], [w2])
    with pytest.raises(ValueError, match=r"w13 must be \[e, \(1\+gated\)\*i, h\]"):
        ops.moe(*given)
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, relu, relu2"):
        ops.moe(*given, activation="swish", gated=False)
    with pytest.raises(ValueError, match="clamp limits gate and up of silu, not of relu2 without a gate"):
        ops.moe(*given, activation="relu2", gated=False, clamp=True)
    with pytest.raises(ValueError, match="clamp limits gate and up of silu"):
        moe.OP.problem("m=1,top_k=1,e=1,h=8,i=8,activation=gelu,epilogue=clamp")
    out = ops.moe(*given, activation="relu2", gated=False)
    torch.testing.assert_close(
        out, moe.reference(x, weights, ids, w13, w2, activation="relu2", gated=False), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("activation=gelu_tanh", ("silu", True)),
        ("activation=relu2,gated=false", ("relu", False)),
        ("activation=gelu,gated=false", ("gelu_tanh", False)),
        ("activation=relu2", ("silu", True)),
    ],
)
def test_verification_catches_another_activation(text: str, wrong: tuple[str, bool]) -> None:
    """Planted faults; gelu's two formulas differ by little, in float32 by more than the tolerance."""
    op = moe.OP
    problem = op.problem(f"m=33,top_k=2,e=4,h=64,i=48,x=fp32,w=fp32,{text}")
    arguments = op.inputs(problem, 9, "cpu")
    expected = run_reference(op, arguments)
    assert op.error is not None
    outputs = [moe.reference(*arguments[:14], *wrong)]
    assert op.error(problem, arguments, outputs, expected) > op.tolerance(problem).limit
