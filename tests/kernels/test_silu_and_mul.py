"""silu_and_mul: agreement with transformers' SwiGLU, both ends of silu, strides, refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from gristmill import ops
from gristmill.kernels.activation.silu_and_mul import OP, reference
from tests.calls import positional
from tests.kernels.running import Runnable, close, padded_rows, runnables, verify_fault

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def test_means_what_the_model_computes_between_its_projections() -> None:
    mlp = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2))
    seen: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    x = torch.randn(5, 16)
    with torch.no_grad():
        mlp(x)
        merged = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
    torch.testing.assert_close(reference(merged), seen[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", runnables("silu_and_mul"), ids=str)
def test_both_ends_of_silu_and_special_values(implementation: Runnable) -> None:
    gates = torch.tensor(
        [-1e30, -200.0, -104.0, -88.0, -20.0, -1.0, -0.0, 0.0, 1.0, 20.0, 88.0, 200.0, 1e30, float("inf")]
    )
    x = torch.cat([gates, torch.full_like(gates, 2.0)])[None]
    out = torch.empty(1, gates.numel())
    implementation(x, out)
    gates64 = gates.double()
    exact = gates64 / (1 + torch.exp(-gates64)) * 2
    exact[0], exact[-1] = 0, torch.inf
    torch.testing.assert_close(out[0].double(), exact, rtol=4e-6, atol=1e-35)
    x[0, 3] = float("nan")
    implementation(x, out)
    assert out[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("implementation", runnables("silu_and_mul"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_row_strides_and_leading_dimensions(implementation: Runnable, dtype: str) -> None:
    x = padded_rows((3 * torch.randn(6, 2 * 131)).to(DTYPES[dtype]))
    out = padded_rows(torch.zeros(6, 131, dtype=DTYPES[dtype]))
    implementation(x, out)
    assert close(out, reference(x), "silu_and_mul", f"m=6,n=131,x={dtype}")
    assert out._base is not None and out._base.isnan().sum() == out._base.numel() - out.numel(), (
        "wrote between rows"
    )
    deep = x.contiguous().view(2, 3, 262)
    out = torch.empty(2, 3, 131, dtype=deep.dtype)
    implementation(deep, out)
    assert close(out, reference(deep), "silu_and_mul", f"m=6,n=131,x={dtype}")


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"x must be \[..., 2\*n\] with n a whole number, got \[2, 7\]"):
        ops.silu_and_mul(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"x must be \[..., 2\*n\] with n at least 1, got \[2, 0\]"):
        ops.silu_and_mul(torch.randn(2, 0))
    with pytest.raises(ValueError, match="contiguous in the last dimension"):
        ops.silu_and_mul(torch.randn(8, 2).t())
    with pytest.raises(ValueError, match=r"x must be \[..., 2\*n\] .*got \[\]"):
        ops.silu_and_mul(torch.tensor(1.0))
    static = OP.static(OP.problem("n=4,x=fp32"))
    x = torch.randn(3, 8)
    assert OP.guard(static)(OP.Call(x, torch.empty(3, 4))) == 3
    for wrong in (
        torch.empty(3, 5),
        torch.empty(2, 4),
        torch.empty(3, 4).bfloat16(),
        torch.empty(4, 3).t(),
        torch.empty(1, 4).expand(3, 4),
    ):
        with pytest.raises(ValueError, match="planned for|contiguous|overlap"):
            OP.guard(static)(OP.Call(x, wrong))
    with pytest.raises(ValueError, match="planned for"):
        OP.guard(static)(OP.Call(x[:, :6], torch.empty(3, 4)))


@positional
def up_first(config: Any, x: Any, out: Any) -> None:
    out.copy_(reference(x.roll(x.shape[-1] // 2, -1)))


@positional
def interleaved(config: Any, x: Any, out: Any) -> None:
    out.copy_(reference(torch.cat([x[..., 0::2], x[..., 1::2]], -1)))


@positional
def skipped_tail(config: Any, x: Any, out: Any) -> None:
    full = out.shape[-1] // 16 * 16
    out[..., :full].copy_(reference(x)[..., :full])
    out[..., full:] = 0


@positional
def unwritten_row(config: Any, x: Any, out: Any) -> None:
    out[:-1].copy_(reference(x)[:-1])


@positional
def gelu_instead(config: Any, x: Any, out: Any) -> None:
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate) * up)


@pytest.mark.parametrize(
    "fault", ["up_first", "interleaved", "skipped_tail", "unwritten_row", "gelu_instead"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_verification_catches_wrong_kernels(fault: str, dtype: str) -> None:
    assert not verify_fault("silu_and_mul", __name__, fault, f"m=7,n=257,x={dtype}").ok


def test_operator(policy_file: Any) -> None:
    policy_file()
    x = torch.randn(3, 40)
    torch.testing.assert_close(ops.silu_and_mul(x), reference(x), rtol=4e-6, atol=1e-6)
    torch.library.opcheck(torch.ops.gristmill.silu_and_mul.default, (x,))
