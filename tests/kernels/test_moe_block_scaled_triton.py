"""Experts on block-scaled codes in Triton: rows quantized by their own factors bit for bit, and whole calls in the interpreter."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry import Kernel, Target, default_registry
from gristmill.kernels.interpreter import install
from gristmill.kernels.linear.block_scaled_triton.quantize import OPERANDS
from gristmill.kernels.linear.block_scaled_triton.quantize import quantize as quantize_rows
from gristmill.kernels.moe._block_scaled_chain import sizes_of_rows
from gristmill.kernels.moe.moe import block_scaled_triton
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.kernels.test_block_scaled_triton import rows

pytest.importorskip("triton", reason="triton is not installed")
OP = default_registry().op("moe")
MX, NVFP4 = (default_registry().kernel("moe", f"moe_{name}_triton") for name in ("mx", "nvfp4"))
SIZES = "top_k=3,e=5,h=96,i=64"


@pytest.fixture(autouse=True)
def repaired() -> None:
    install()


@pytest.mark.parametrize("form", OPERANDS)
@pytest.mark.parametrize(("m", "k"), [(3, 32), (5, 1056)])
def test_each_row_is_quantized_alone_bit_for_bit(form: str, m: int, k: int) -> None:
    x, of_x = rows(m, k), OPERANDS[form]
    sizes = sizes_of_rows(form, m, k)
    codes, scales = (torch.full((size,), 0xAA, dtype=torch.uint8) for size in sizes[:2])
    factors = torch.full((sizes[2] // 4,), float("nan"))
    quantize_rows(of_x, x, m, k, codes, scales, factors, by_row=True)
    expected = quantize_activation(x, form, by_row=True)
    count = m * k // of_x.packed
    assert torch.equal(codes[:count].view(m, -1), expected.values.view(torch.uint8))
    assert torch.equal(scales[: m * (k // of_x.group)].view(m, -1), expected.scales.view(torch.uint8))
    assert torch.equal(codes[count:], torch.full_like(codes[count:], 0xAA)), "written past the codes"
    if expected.global_scale is not None:
        assert torch.equal(factors[:m, None], expected.global_scale)


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
@pytest.mark.parametrize("scheme", ["nvfp4.nvfp4", "mxfp4.mxfp4", "mxfp4.mxfp8", "mxfp8.mxfp8"])
def test_more_experts_than_a_power_of_two_and_many_rows_of_one(scheme: str, target: str) -> None:
    kernel = NVFP4 if scheme == "nvfp4.nvfp4" else MX
    for text in ("m=11,top_k=4,e=33,h=32,i=32", "m=150,top_k=1,e=2,h=32,i=64,epilogue=w13_bias"):
        problem = OP.problem(f"{text},w={scheme}")
        outcome = verify(OP, kernel, kernel.config(problem, Target.parse(target)), problem, "cpu")
        assert outcome.ok, outcome.reason


def call(scheme: str, workspace: torch.Tensor | None, **changed: torch.Tensor) -> object:
    """A call of seven tokens, with slots of the second weight changed."""
    weights = scheme.partition(".")[0]
    w13, w2 = (
        pack(quantize(torch.randn(5, n, k), weights), "plain_v1").slots for n, k in ((128, 96), (96, 64))
    )
    slots = {**w2, **changed}
    x, ids = torch.randn(7, 96), torch.randint(0, 5, (7, 3), dtype=torch.int32)
    silu = (None, None, False, 1.702, 7.0)
    scores = torch.rand(7, 3)
    return make_call(
        "moe",
        x,
        scores,
        ids,
        list(w13.values()),
        list(slots.values()),
        64,
        workspace,
        *silu,
        torch.empty(7, 96),
    )


@pytest.mark.parametrize("scheme", ["nvfp4.nvfp4", "mxfp4.mxfp8"])
def test_a_workspace_may_hold_anything_but_must_be_large_enough(scheme: str) -> None:
    kernel = NVFP4 if scheme == "nvfp4.nvfp4" else MX
    problem = OP.problem(f"m=7,{SIZES},x=fp32,w={scheme}")
    config = kernel.config(problem, Target.parse("sm_100"))
    size = kernel.workspace(problem, config).bytes
    made = call(scheme, torch.full((size,), 0xFF, dtype=torch.uint8))
    block_scaled_triton.launch(config, made)  # type: ignore[arg-type]
    first = made.out.clone()  # type: ignore[attr-defined]
    assert first.isfinite().all()
    block_scaled_triton.launch(config, made.replace(workspace=None))  # type: ignore[attr-defined]
    assert torch.equal(made.out, first)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="contiguous bytes"):
        block_scaled_triton.launch(config, made.replace(workspace=made.workspace[:-1]))  # type: ignore[attr-defined]


def test_another_weight_is_refused_by_name() -> None:
    config = MX.config(OP.problem(f"m=7,{SIZES},x=fp32,w=mxfp8.mxfp8"), Target.parse("sm_100"))
    for name, changed in (
        ("codes", torch.zeros(5, 95, 64, dtype=torch.uint8)),
        ("perm", torch.arange(64, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=r"expected codes \[5, 96, 64\] and scales \[5, 96, 2\]"):
            block_scaled_triton.launch(config, call("mxfp8.mxfp8", None, **{name: changed}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MX, f"m=1,{SIZES},w=mxfp4.mxfp8", None),
        (MX, f"m=1,{SIZES},w=nvfp4.nvfp4", "not nvfp4.nvfp4"),
        (MX, f"m=1,{SIZES},w=mxfp4", "not mxfp4"),
        (MX, "m=1,top_k=3,e=5,h=96,i=48,w=mxfp4.mxfp4", "multiples of 32"),
        (NVFP4, "m=1,top_k=3,e=5,h=96,i=48,w=nvfp4.nvfp4", None),
        (NVFP4, "m=1,top_k=3,e=5,h=40,i=48,w=nvfp4.nvfp4", "multiples of 16"),
        (NVFP4, f"m=1,{SIZES},w=nvfp4.nvfp4,act_order=true", "not act-order"),
    ],
)
def test_accepts(kernel: Kernel, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["sm_90", "sm_89", "gfx942", "gfx1201"])
def test_targets_without_block_scales(name: str) -> None:
    for kernel in (MX, NVFP4):
        assert "lacks" in kernel.requires.check_hardware(Target.parse(name))[0]
    gfx950 = Target.parse("gfx950")
    assert NVFP4.requires.check_hardware(gfx950) and not MX.requires.check_hardware(gfx950)
