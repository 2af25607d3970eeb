"""gelu_and_mul: agreement with transformers' Gemma and with mathematics, both ends of gelu, strides, refusals, planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP

from gristmill import ops
from gristmill.kernels.activation.gelu_and_mul import reference
from tests.calls import positional
from tests.kernels.running import Runnable, close, padded_rows, runnables, verify_fault

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def test_means_what_the_model_computes_between_its_projections() -> None:
    mlp = Gemma2MLP(Gemma2Config(hidden_size=16, intermediate_size=24, num_attention_heads=2))
    seen: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    x = torch.randn(5, 16)
    with torch.no_grad():
        mlp(x)
        merged = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
    torch.testing.assert_close(reference(merged, "tanh"), seen[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", runnables("gelu_and_mul"), ids=str)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_both_ends_of_gelu_and_special_values(implementation: Runnable, approximate: str) -> None:
    gates = torch.tensor([-1e12, -200.0, -12.0, -5.0, -1.0, -0.0, 0.0, 1.0, 5.0, 12.0, 200.0, 1e12])
    x = torch.cat([gates, torch.full_like(gates, 2.0)])[None]
    out = torch.empty(1, gates.numel())
    implementation(x, approximate, out)
    exact = []
    for g in gates.tolist():
        z = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        twice = min(-2 * z, 700.0)
        exact.append(
            2 * g * (1 / (1 + math.exp(twice)) if approximate == "tanh" else math.erfc(-g / math.sqrt(2)) / 2)
        )
    torch.testing.assert_close(
        out[0].double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-5, atol=1e-30
    )
    x[0, 3] = float("nan")
    implementation(x, approximate, out)
    assert out[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("implementation", runnables("gelu_and_mul"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_row_strides_and_leading_dimensions(implementation: Runnable, dtype: str) -> None:
    problem = f"m=6,n=131,x={dtype},approximate=tanh"
    x = padded_rows((3 * torch.randn(6, 2 * 131)).to(DTYPES[dtype]))
    out = padded_rows(torch.zeros(6, 131, dtype=DTYPES[dtype]))
    implementation(x, "tanh", out)
    assert close(out, reference(x, "tanh"), "gelu_and_mul", problem)
    assert out._base is not None and out._base.isnan().sum() == out._base.numel() - out.numel(), (
        "wrote between rows"
    )
    deep = x.contiguous().view(2, 3, 262)
    out = torch.empty(2, 3, 131, dtype=deep.dtype)
    implementation(deep, "tanh", out)
    assert close(out, reference(deep, "tanh"), "gelu_and_mul", problem)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"x must be \[..., 2\*n\] with n a whole number, got \[2, 7\]"):
        ops.gelu_and_mul(torch.randn(2, 7))
    with pytest.raises(ValueError, match="approximate"):
        ops.gelu_and_mul(torch.randn(2, 8), "sigmoid")


@positional
def up_first(config: Any, x: Any, approximate: Any, out: Any) -> None:
    n = out.shape[-1]
    out.copy_(reference(torch.cat([x[..., n:], x[..., :n]], -1), approximate))


@positional
def other_formula(config: Any, x: Any, approximate: Any, out: Any) -> None:
    out.copy_(reference(x, "none" if approximate == "tanh" else "tanh"))


@positional
def skipped_tail(config: Any, x: Any, approximate: Any, out: Any) -> None:
    full = out.shape[-1] // 16 * 16
    out[..., :full].copy_(reference(x, approximate)[..., :full])
    out[..., full:] = 0


@pytest.mark.parametrize("fault", ["up_first", "other_formula", "skipped_tail"])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_verification_catches_wrong_kernels(fault: str, approximate: str) -> None:
    problem = f"m=7,n=257,x=fp32,approximate={approximate}"
    assert not verify_fault("gelu_and_mul", __name__, fault, problem).ok


def test_operator(policy_file: Any) -> None:
    policy_file()
    x = torch.randn(3, 40)
    torch.testing.assert_close(ops.gelu_and_mul(x, "tanh"), reference(x, "tanh"), rtol=4e-6, atol=1e-6)
    torch.library.opcheck(torch.ops.gristmill.gelu_and_mul.default, (x, "tanh"))
