"""layer_norm: agreement with transformers and with mathematics, strides, refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from gristmill import ops
from gristmill.kernels.norm.layer_norm import reference
from tests.calls import positional
from tests.kernels.running import Runnable, close, padded_rows, runnables, verify_fault

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPS = 1e-5


def test_means_what_transformers_means() -> None:
    x, norm = 3 + torch.randn(9, 257), CohereLayerNorm(257, eps=EPS)
    with torch.no_grad():
        norm.weight += 0.3 * torch.randn(257)
        expected = norm(x)
    torch.testing.assert_close(reference(x, norm.weight.detach(), None, EPS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", runnables("layer_norm"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 131, 17000])
def test_against_float64_with_a_large_mean(implementation: Runnable, dtype: str, n: int) -> None:
    """A variance as the difference of two sums would be lost beside a mean of 100."""
    x, weight, bias = (t.to(DTYPES[dtype]) for t in (100 + torch.randn(4, n), torch.randn(n), torch.randn(n)))
    out = torch.empty_like(x)
    implementation(x, weight, bias, EPS, None, out)
    exact = torch.nn.functional.layer_norm(x.double(), (n,), weight.double(), bias.double(), EPS)
    rtol = {"fp32": 2e-5, "fp16": 2**-10, "bf16": 2**-7}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=2e-4)


@pytest.mark.parametrize("implementation", runnables("layer_norm"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_row_strides_and_leading_dimensions(implementation: Runnable, dtype: str) -> None:
    kind = DTYPES[dtype]
    x, weight = padded_rows((2 + torch.randn(6, 131)).to(kind)), (1 + 0.3 * torch.randn(131)).to(kind)
    out = padded_rows(torch.zeros_like(x))
    implementation(x, weight, None, EPS, None, out)
    expected = reference(x, weight, None, EPS)
    assert close(out, expected, "layer_norm", f"m=6,n=131,x={dtype}")
    assert out._base is not None and out._base.isnan().sum() == out._base.numel() - out.numel(), (
        "wrote between rows"
    )
    deep = x.contiguous().view(2, 3, 131)
    out = torch.empty_like(deep)
    implementation(deep, weight, None, EPS, None, out)
    assert torch.equal(out.view(6, 131), expected) or close(
        out.view(6, 131), expected, "layer_norm", f"m=6,n=131,x={dtype}"
    )


@pytest.mark.parametrize("implementation", runnables("layer_norm"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["x", "residual", "apart"])
def test_the_residual_is_added_first(implementation: Runnable, dtype: str, place: str) -> None:
    """As a block of BERT does: the stored sum is torch's own, bit for bit, and the norm, which may be written over x or over the sum, is of it."""
    kind = DTYPES[dtype]
    x, residual = (padded_rows((offset + torch.randn(5, 300)).to(kind)) for offset in (1, -3))
    weight, bias = ((offset + 0.3 * torch.randn(300)).to(kind) for offset in (1, 0))
    total = residual + x
    expected = reference(total, weight, bias, EPS)
    out = {"x": x, "residual": residual, "apart": torch.empty_like(x)}[place]
    implementation(x, weight, bias, EPS, residual, out)
    if place != "residual":
        assert torch.equal(residual, total)
    assert close(out, expected, "layer_norm", f"m=5,n=300,x={dtype},bias=true")


def test_refusals() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"weight must be \[n\] = \[8\], .*got \[7\]"):
        ops.layer_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match=r"bias must be \[n\] = \[8\], .*got \[1\]"):
        ops.layer_norm(x, torch.ones(8), torch.ones(1))
    with pytest.raises(ValueError, match="eps must be at least 0"):
        ops.layer_norm(x, torch.ones(8), None, -1.0)
    with pytest.raises(ValueError, match=r"residual must be \[..., n\].*got \[2, 7\]"):
        ops.layer_norm(x, torch.ones(8), None, EPS, torch.ones(2, 7))


@positional
def mean_kept(config: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any) -> None:
    out.copy_(torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps))


@positional
def no_bias(config: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any) -> None:
    out.copy_(reference(x, weight, None, eps))


@positional
def sample_variance(config: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any) -> None:
    n = x.shape[-1]
    out.copy_(((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt()) * weight + bias)
    assert n > 1


@positional
def last_column(config: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any) -> None:
    out.copy_(reference(x, weight, bias, eps))
    out[:, -1] = out[:, 0]


@positional
def sum_not_stored(config: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any) -> None:
    out.copy_(reference(x + residual, weight, bias, eps))


@positional
def residual_ignored(config: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any) -> None:
    residual.add_(x)
    out.copy_(reference(x, weight, bias, eps))


@pytest.mark.parametrize("fault", ["sum_not_stored", "residual_ignored"])
def test_verification_catches_a_wrong_residual(fault: str) -> None:
    problem = "m=7,n=257,x=fp32,bias=true,residual=true"
    assert not verify_fault("layer_norm", __name__, fault, problem).ok


@pytest.mark.parametrize("fault", ["mean_kept", "no_bias", "sample_variance", "last_column"])
def test_verification_catches_wrong_kernels(fault: str) -> None:
    assert not verify_fault("layer_norm", __name__, fault, "m=7,n=257,x=fp32,bias=true").ok


def test_operator(policy_file: Any) -> None:
    policy_file()
    x, weight, bias = torch.randn(3, 40), torch.randn(40), torch.randn(40)
    torch.testing.assert_close(
        ops.layer_norm(x, weight, bias), reference(x, weight, bias), rtol=4e-6, atol=1e-6
    )
    torch.library.opcheck(torch.ops.gristmill.layer_norm.default, (x, weight, bias))
    residual = torch.randn(3, 40)
    total = residual + x
    torch.testing.assert_close(
        ops.layer_norm(x, weight, bias, EPS, residual), reference(total, weight, bias), rtol=4e-6, atol=1e-6
    )
    assert torch.equal(residual, total)
