"""LinearFp32: which weights it multiplies in the model's dtype, and that logits are those of float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.runtime.layers import linear_fp32
from gristmill.runtime.layers.linear_fp32 import LinearFp32
from gristmill.runtime.layers.plans import Plans

CPU = torch.device("cpu")


def drawn(dtype: torch.dtype, rows: int = 24) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)).to(dtype).float()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, policy_file: Any) -> None:
    policy_file()
    monkeypatch.setattr(linear_fp32, "takes_16_bits", lambda plans: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("stored", "model", "multiplied"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_weight_is_multiplied_as_it_was_stored(
    stored: torch.dtype, model: torch.dtype, multiplied: torch.dtype, biased: bool
) -> None:
    weight, plans = drawn(stored), Plans(CPU, model)
    weight[0, 0] = 2.0**-30  # of a bfloat16, not of a float16
    if stored is torch.float16:
        weight[0, 0] = 2.0**-14
    bias = torch.arange(24.0) if biased else None
    layer, x = LinearFp32(plans, weight, bias), drawn(model, 5).to(model)
    assert layer.linear is None and layer.weight.dtype is multiplied
    expected = x.float() @ weight.T
    y = layer(x)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, expected if bias is None else expected + bias, rtol=1e-6, atol=1e-6)
    assert layer(x[:0]).shape == (0, 24)
    assert plans.weight_bytes == layer.weight.nbytes + (0 if bias is None else bias.nbytes)


def test_a_cpu_and_a_model_in_float32_multiply_float32(policy_file: Any) -> None:
    policy_file()
    for model in (torch.bfloat16, torch.float32):
        weight, plans = drawn(torch.bfloat16), Plans(CPU, model)
        layer, x = LinearFp32(plans, weight), drawn(model, 3).to(model)
        assert layer.linear is not None and {problem.op for problem, _ in plans.bound} == {"linear"}
        torch.testing.assert_close(layer(x), x.float() @ weight.T, rtol=1e-5, atol=1e-5)
