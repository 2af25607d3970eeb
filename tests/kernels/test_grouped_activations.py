"""grouped_linear with quantized activations: the reference against an independent oracle, a row at a time; kernels of block formats without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry import Target, default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels import given_codes
from gristmill.kernels.interpreter import install
from gristmill.kernels.moe.grouped_linear import block_scaled_triton
from gristmill.quant import quantize
from tests.quant.oracle import round_trip
from tests.quant.test_activations import expected, tokens

pytest.importorskip("triton", reason="triton is not installed")
OP = default_registry().op("grouped_linear")
KERNELS = {
    kernel: default_registry().kernel("grouped_linear", f"grouped_linear_{kernel}")
    for kernel in (
        "torch",
        "mx_triton",
        "nvfp4_triton",
        "block_scaled_cutedsl_sm100",
        "fp4_sm120",
        "mxfp8_sm120",
    )
}


@pytest.fixture(autouse=True)
def repaired() -> None:
    install()


@pytest.mark.parametrize(
    "scheme", ["nvfp4.nvfp4", "mxfp4.mxfp4", "mxfp8.mxfp8", "mxfp4.mxfp8", "fp8_block.fp8_g128"]
)
def test_the_reference_quantizes_each_row_alone(scheme: str) -> None:
    """Against the oracle of formats. Rows have very different sizes: an expert of none, of one, and rows past the last one's."""
    weights, _, form = scheme.partition(".")
    x, generator = tokens(4, 128), torch.Generator().manual_seed(1)
    dense = torch.randn(3, 40, 128, generator=generator) / 12
    weight = replace(quantize(dense, weights), scheme=QuantScheme.parse(scheme))
    offsets, permutation = (
        torch.tensor([0, 0, 1, 6], dtype=torch.int32),
        torch.tensor([7, 3, 1, 0, 6, 2, 5, 4]).int(),
    )
    out = OP.reference(x, weight, offsets, permutation, 2)
    rows = x[permutation.long() // 2]
    for place, e in enumerate([1, 2, 2, 2, 2, 2]):
        values = torch.from_numpy(expected(rows[place : place + 1].numpy(), form))
        y = values @ torch.from_numpy(round_trip(dense[e].numpy(), weights)).T
        assert torch.allclose(out[place : place + 1], y, rtol=0, atol=2e-5 * float(y.abs().max() + 1e-3)), (
            place
        )
    assert not bool(out[6:].any())


def test_formats_of_the_whole_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="quantized a row at a time"):
        OP.problem("m=4,e=2,n=16,k=32,w=fp8.fp8")


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        ("mx_triton", "m=4,e=2,n=16,k=48,w=mxfp4.mxfp4", "K in multiples of 32"),
        ("mx_triton", "m=4,e=2,n=16,k=64,w=nvfp4.nvfp4", "not nvfp4.nvfp4"),
        ("nvfp4_triton", "m=4,e=2,n=16,k=48,w=nvfp4.nvfp4", None),
        ("block_scaled_cutedsl_sm100", "m=4,e=2,n=72,k=128,w=mxfp4.mxfp8,epilogue=bias", None),
        (
            "block_scaled_cutedsl_sm100",
            "m=4,e=2,n=24,k=128,w=mxfp8.mxfp8,epilogue=silu_mul",
            "multiples of 8, got 12",
        ),
        ("block_scaled_cutedsl_sm100", "m=4,e=2,n=12,k=128,w=nvfp4.nvfp4", "multiples of 8, got 12"),
        ("fp4_sm120", "m=4,e=2,n=64,k=128,w=mxfp4.mxfp4,epilogue=silu_mul", None),
        ("fp4_sm120", "m=4,e=2,n=48,k=128,w=nvfp4.nvfp4,epilogue=silu_mul", "N of 32"),
        ("mxfp8_sm120", "m=4,e=2000,n=64,k=128,w=mxfp8.mxfp8", "up to 1024 experts"),
        ("fp4_sm120", "m=4,e=2,n=64,k=128,x=fp32,w=nvfp4.nvfp4", "fp16 or bf16"),
    ],
)
def test_accepts(kernel: str, problem: str, reason: str | None) -> None:
    refusal = KERNELS[kernel].accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def outcome(kernel: str, problem: str) -> str | None:
    """Why a kernel's result is wrong, None if it is right."""
    made, spec = OP.problem(problem), KERNELS[kernel]
    result = verify(OP, spec, spec.config(made, Target.parse("sm_120")), made, "cpu")
    return None if result.ok else result.reason


NVFP4 = "m=40,e=3,n=40,k=64,w=nvfp4.nvfp4,gather=2"


def test_one_factor_of_all_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of very different sizes: small ones lose their scales under a factor of the largest."""
    assert outcome("torch", NVFP4) is None
    of_rows = given_codes.activations
    monkeypatch.setattr(given_codes, "activations", lambda x, form, by_row: of_rows(x, form))
    assert outcome("torch", NVFP4)


def test_rows_of_no_expert_that_are_not_zeroed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome("nvfp4_triton", NVFP4) is None
    monkeypatch.setattr(block_scaled_triton, "clear", lambda call: call.out[-1].fill_(1.0))
    assert outcome("nvfp4_triton", "m=90,e=3,n=40,k=64,w=nvfp4.nvfp4")
