"""rms_norm_quant and silu_and_mul_quant: the bits of the operation without quantization, quantized; ties, strides, saturation, NaN,
refusals, planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernel_registry.op import Op
from gristmill.kernels.activation import silu_and_mul, silu_and_mul_quant
from gristmill.kernels.load import load
from gristmill.kernels.norm import fused_add_rms_norm, rms_norm, rms_norm_quant
from gristmill.kernels.quantized_rows import GROUPS
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call, positional
from tests.kernels.running import REGISTRY, Runnable, padded_rows, runnables, verify_fault

NORM, GATE = rms_norm_quant.OP, silu_and_mul_quant.OP
RUNNABLES = [*runnables("rms_norm_quant"), *runnables("silu_and_mul_quant")]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def problem_of(op: Op, format: str, m: int, n: int, x: str = "bf16", residual: bool = False) -> str:
    text = f"m={m},n={n},x={x},q={format.partition('_')[0]},format={format}"
    return text + (",residual=true" if residual and op.name == NORM.name else "")


def call_of(op: Op, text: str) -> list[Any]:
    """Without `normed`."""
    return op.inputs(op.problem(text), 0, "cpu")[: 7 if op.name == NORM.name else 4]


def unquantized(implementation: Runnable, call: list[Any]) -> torch.Tensor:
    """Returns what the C++ kernel without quantization computes at the same code level."""
    name = "silu_and_mul" if len(call) == 4 else "rms_norm" if call[1] is None else "fused_add_rms_norm"
    kernel = REGISTRY.kernel(name, f"{name}_cpu")
    codes = call[-3]
    out = torch.empty(codes.shape, dtype=call[0].dtype)
    config = kernel.config(REGISTRY.op(name).problem(f"n={codes.shape[-1]}"), implementation.target)
    tensors = [call[0].clone()] if len(call) == 4 else [x for x in call[:4] if x is not None]
    load(kernel)(
        config, make_call(kernel.op, *(t.clone() if isinstance(t, torch.Tensor) else t for t in tensors), out)
    )
    return out


@pytest.mark.parametrize("implementation", [r for r in RUNNABLES if r.kernel.language == "cpp"], ids=str)
@pytest.mark.parametrize("x", DTYPES)
def test_codes_are_those_of_the_separate_kernel_quantized(implementation: Runnable, x: str) -> None:
    """Bit for bit, codes and scales, in every format: what a layer computes does not change when it is fused."""
    for format in GROUPS:
        for residual in (False, True):
            call = call_of(implementation.op, problem_of(implementation.op, format, 7, 391, x, residual))
            scale = call[-2].clone().view(1) if format == "fp8" else None
            expected = quantize_activation(unquantized(implementation, call), format, scale=scale)
            implementation(*call)
            *_, codes, scales, _ = call
            assert torch.equal(codes.view(torch.uint8), expected.values.view(torch.uint8)), (format, residual)
            assert torch.equal(scales, expected.scales.view(scales.shape)), (format, residual)


def test_references_are_compositions() -> None:
    for format in GROUPS:
        x, residual, weight, eps, codes, scales, _ = call_of(
            NORM, problem_of(NORM, format, 5, 300, residual=True)
        )
        summed = residual.clone()
        scale = scales.clone().view(1) if format == "fp8" else None
        expected = quantize_activation(
            fused_add_rms_norm.reference(x, summed, weight, eps), format, scale=scale
        )
        rms_norm_quant.reference(x, residual, weight, eps, codes, scales, format)
        assert torch.equal(residual, summed)
        assert torch.equal(codes.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(scales, expected.scales.view(scales.shape))


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
@pytest.mark.parametrize("format", GROUPS)
def test_strided_rows(implementation: Runnable, format: str) -> None:
    """Rows of wider buffers, of x, of the residual and of the codes; what is between the rows stays as it is. Scales in the order of
    groups."""
    op = implementation.op
    text = problem_of(op, format, 3, 257, residual=True)
    call = call_of(op, text)
    plain = [x.clone() if isinstance(x, torch.Tensor) else x for x in call]
    op.reference(*plain)
    wide = torch.full((3, 271), 77, dtype=torch.uint8).view(call[-3].dtype)
    call[0], call[-3] = padded_rows(call[0]), wide[:, 4:261]
    if format != "fp8":
        call[-2] = torch.full((call[-2].shape[1], 4), 7.0).T[:3]
    if op.name == NORM.name:
        call[1] = padded_rows(call[1])
    arguments = [x.clone() if isinstance(x, torch.Tensor) else x for x in call]
    implementation(*call)
    written = [x for p, x in zip(op.parameters, call, strict=False) if p.mutable]
    expected = [x for p, x in zip(op.parameters, plain, strict=False) if p.mutable]
    assert op.error(op.problem(text), arguments, written, expected) <= op.tolerance(op.problem(text)).limit
    around = torch.cat((wide.view(torch.uint8)[:, :4], wide.view(torch.uint8)[:, 261:]), 1)
    assert (around == 77).all()


@pytest.mark.parametrize("implementation", runnables("rms_norm_quant"), ids=str)
@pytest.mark.parametrize("format", ["fp8", "fp8_token", "int8_token"])
def test_ties_zeros_and_saturation(implementation: Runnable, format: str) -> None:
    """With eps = 0 and rows of one magnitude the norm is the weight, so that every code, every middle between two, and values
    past the largest are reached."""
    if format == "int8_token":
        points = torch.arange(-127, 127.5, 0.5)
    else:
        finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        points = torch.cat((finite, (finite[1:] + finite[:-1]) / 2, -finite))
        points = torch.cat((points, torch.tensor([460.0, 1e9, -1e9]))) if format == "fp8" else points
    n = points.numel()
    codes = torch.zeros(1, n, dtype=torch.int8 if format == "int8_token" else torch.float8_e4m3fn)
    scales = torch.ones(1, 1)
    implementation(torch.ones(1, n), None, points, 0.0, codes, scales, format)
    assert scales.item() == 1.0
    expected = quantize_activation(points[None], format, scale=scales.view(1) if format == "fp8" else None)
    assert torch.equal(codes.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
def test_nan_shows_in_the_scale(implementation: Runnable) -> None:
    """Of its row or group, and of no other; rows of zeros have the smallest scale."""
    for format in ("fp8_token", "fp8_g128", "int8_token"):
        call = call_of(implementation.op, problem_of(implementation.op, format, 3, 256, "fp32"))
        call[0][1, 200] = math.nan
        call[0][2] = 0
        implementation(*call)
        scales = call[-2]
        whole_row = implementation.op.name == NORM.name or scales.shape[1] == 1
        assert scales[1].isnan().tolist() == [True] * scales.shape[1] if whole_row else [False, True]
        assert not scales[[0, 2]].isnan().any()
        least = (1e-4 if format == "fp8_g128" else 1e-10) / (127 if format == "int8_token" else 448)
        assert torch.equal(scales[2], torch.full_like(scales[2], 1).mul(least)) or math.isclose(
            scales[2, 0].item(), least, rel_tol=1e-6
        )
        assert (call[-3][2].float() == 0).all()


def test_refusals() -> None:
    x, weight = torch.randn(4, 256), torch.ones(256)
    codes, scales = torch.empty(4, 256, dtype=torch.int8), torch.empty(4, 1)
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((codes, scales, "int4_token"), ValueError, "format must be one of fp8, fp8_token"),
        ((codes, scales, "fp8_token"), ValueError, "the codes of fp8_token are fp8, got int8"),
        ((codes, scales, "int8_g128"), ValueError, r"scales of int8_g128 must be \[4, 2\], got \[4, 1\]"),
        ((codes.view(torch.uint8), scales, "int8_token"), TypeError, "codes must be .*int8, got torch.uint8"),
        ((codes[:, :255], scales, "int8_token"), ValueError, r"n as in (x|codes)"),
        ((codes, scales.double(), "int8_token"), TypeError, "scales must be torch.float32"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            ops.rms_norm_quant(x, None, weight, 1e-5, *arguments)
        with pytest.raises(kind, match=message):
            ops.silu_and_mul_quant(torch.randn(4, 512), *arguments)


@positional
def scale_doubled(config: Any, *call: Any) -> None:
    NORM.reference(*call)
    call[5][-1] *= 2


@positional
def a_group_late(config: Any, *call: Any) -> None:
    NORM.reference(*call)
    call[5].copy_(call[5].roll(1, -1))


@positional
def code_of_the_next_column(config: Any, *call: Any) -> None:
    NORM.reference(*call)
    call[4].view(torch.uint8)[-1, 5] = call[4].view(torch.uint8)[-1, 6]


@positional
def residual_not_written(config: Any, x: Any, residual: Any, *rest: Any) -> None:
    NORM.reference(x, residual.clone(), *rest)


@positional
def norm_of_x_alone(config: Any, x: Any, residual: Any, *rest: Any) -> None:
    NORM.reference(x, None, *rest)
    residual.copy_(x.float() + residual.float())


@positional
def not_rounded_first(
    config: Any,
    x: Any,
    residual: Any,
    weight: Any,
    eps: float,
    codes: Any,
    scales: Any,
    form: str,
    normed: Any,
) -> None:
    """Quantized from float32: some values of bf16 lie on a tie that this breaks otherwise."""
    residual.copy_(x.float() + residual.float())
    values = rms_norm.reference(residual.float(), weight.float(), eps)
    quantized = quantize_activation(values * 1.02, form)
    codes.copy_(quantized.values)
    scales.copy_(quantized.scales.view(scales.shape))


@pytest.mark.parametrize(
    ("fault", "format"),
    [
        ("scale_doubled", "fp8_token"),
        ("a_group_late", "fp8_g128"),
        ("code_of_the_next_column", "int8_token"),
        ("code_of_the_next_column", "fp8"),
        ("residual_not_written", "fp8_token"),
        ("norm_of_x_alone", "int8_g128"),
        ("not_rounded_first", "int8_g32"),
    ],
)
def test_verification_catches_wrong_kernels(fault: str, format: str) -> None:
    text = problem_of(NORM, format, 5, 300, residual=True)
    assert not verify_fault("rms_norm_quant", __name__, fault, text).ok


@positional
def gate_and_up_swapped(config: Any, x: Any, *rest: Any) -> None:
    GATE.reference(x.roll(x.shape[1] // 2, -1), *rest)


def test_verification_catches_a_wrong_gate() -> None:
    assert not verify_fault("silu_and_mul_quant", __name__, "gate_and_up_swapped", "m=5,n=300").ok


def test_operators(policy_file: Any) -> None:
    policy_file()
    for op, function in ((NORM, ops.rms_norm_quant), (GATE, ops.silu_and_mul_quant)):
        text = problem_of(op, "int8_g128", 4, 200, residual=True)
        call, expected = call_of(op, text), call_of(op, text)
        op.reference(*expected)
        function(*call)
        assert torch.equal(call[-2], expected[-2])
        torch.library.opcheck(
            getattr(torch.ops.gristmill, op.name).default, call, test_utils=("test_faketensor",)
        )
    x = silu_and_mul.inputs(silu_and_mul.OP.problem("m=4,n=200"), 0, "cpu")[0].view(2, 2, 400)
    codes, scales = torch.zeros(2, 2, 200, dtype=torch.int8), torch.zeros(4, 1)
    ops.silu_and_mul_quant(x, codes, scales, "int8_token")
    assert scales.gt(0).all()
