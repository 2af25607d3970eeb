"""activation: agreement with mathematics and with torch, special values, strides, refusals, planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernels.activation.activation import FUNCTIONS, reference
from tests.calls import positional
from tests.kernels.running import Runnable, close, padded_rows, runnables, verify_fault

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EXACT: dict[str, Callable[[float], float]] = {
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: (
        x / (1 + math.exp(min(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3), 700.0)))
    ),
    "silu": lambda x: x / (1 + math.exp(min(-x, 700.0))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}
VALUES = [
    -1e12,
    -200.0,
    -14.0,
    -12.0,
    -5.0,
    -2.5,
    -1.0,
    -1e-3,
    -0.0,
    0.0,
    1e-3,
    1.0,
    2.5,
    5.0,
    12.0,
    200.0,
    1e12,
]


@pytest.mark.parametrize("implementation", runnables("activation"), ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_ends_and_special_values(implementation: Runnable, function: str) -> None:
    x = torch.tensor([VALUES])
    out = torch.empty_like(x)
    implementation(x, function, out)
    exact = torch.tensor([[EXACT[function](value) for value in VALUES]], dtype=torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-30)
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]])
    out = torch.empty_like(x)
    implementation(x, function, out)
    assert out[0, 0].isnan() and out[0, 1] == math.inf and out[0, 2] == 0 and out[0, 3] > 0


@pytest.mark.parametrize("implementation", runnables("activation"), ids=str)
def test_exact_gelu_has_no_cancellation(implementation: Runnable) -> None:
    """A relative error of some units in the last place down to where the result is 1e-30."""
    x = torch.linspace(-11.0, 11.0, 20001)[None]
    out = torch.empty_like(x)
    implementation(x, "gelu", out)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    assert float(((out - exact).abs() / exact.abs().clamp(min=1e-30)).max()) < 8e-6


@pytest.mark.parametrize("implementation", runnables("activation"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_takes_row_strides_and_leading_dimensions(
    implementation: Runnable, dtype: str, function: str
) -> None:
    problem = f"m=6,n=131,x={dtype},function={function}"
    x = padded_rows((2 * torch.randn(6, 131)).to(DTYPES[dtype]))
    out = padded_rows(torch.zeros(6, 131, dtype=DTYPES[dtype]))
    implementation(x, function, out)
    assert close(out, reference(x, function), "activation", problem)
    assert out._base is not None and out._base.isnan().sum() == out._base.numel() - out.numel(), (
        "wrote between rows"
    )
    deep = x.contiguous().view(2, 3, 131)
    implementation(deep, function, deep)  # in place
    assert close(deep.view(6, 131), reference(x, function), "activation", problem)


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match="function must be one of gelu, gelu_tanh, silu, relu, relu2, got 'tanh'"
    ):
        ops.activation(torch.randn(2, 8), "tanh")
    with pytest.raises(TypeError, match="x"):
        ops.activation(torch.ones(2, 8, dtype=torch.int32), "relu")


@positional
def other_formula(config: Any, x: Any, function: Any, out: Any) -> None:
    out.copy_(reference(x, FUNCTIONS[FUNCTIONS.index(function) - 1]))


@positional
def skipped_tail(config: Any, x: Any, function: Any, out: Any) -> None:
    full = out.shape[-1] // 16 * 16
    out[..., :full].copy_(reference(x, function)[..., :full])
    out[..., full:] = 0


@pytest.mark.parametrize("fault", ["other_formula", "skipped_tail"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_verification_catches_wrong_kernels(fault: str, function: str) -> None:
    assert not verify_fault("activation", __name__, fault, f"m=7,n=257,x=fp32,function={function}").ok


def test_operator(policy_file: Any) -> None:
    policy_file()
    x = torch.randn(3, 40)
    torch.testing.assert_close(ops.activation(x, "gelu"), reference(x, "gelu"), rtol=4e-6, atol=1e-6)
    torch.library.opcheck(torch.ops.gristmill.activation.default, (x, "relu2"))
