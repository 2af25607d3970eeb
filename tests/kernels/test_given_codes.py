"""Codes of x that the layer before has made: the product is that of x quantized in the product, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.given_codes import codes_of
from gristmill.kernels.linear.op import pack
from gristmill.kernels.load import load
from gristmill.quant import Packed, QuantTensor, quantize, unpack
from tests.calls import positional
from tests.kernels.running import REGISTRY, Runnable, runnables, verify_fault

LINEAR = REGISTRY.op("linear")
WEIGHTS = {
    "fp8": "fp8",
    "fp8_token": "fp8_ch",
    "fp8_g128": "fp8_block",
    "int8_token": "int8_ch",
    "int8_g32": "int4_g64",
    "int8_g128": "mxfp4",
}
"""A scheme of weights beside each format of activations."""
SIZES = {"linear": "m=9,n=40,k=288", "moe": "m=9,top_k=2,e=3,h=288,i=32"}
TAKING = [r for op in SIZES for r in runnables(op) if "codes" in r.kernel.supports]


def results(implementation: Runnable, form: str, by_column: bool) -> list[torch.Tensor]:
    """The output for x, and for its codes beside an x of NaN."""
    op, made = implementation.op, []
    for codes in (False, True):
        text = f"{SIZES[op.name]},w={WEIGHTS[form]}.{form}"
        problem = op.problem(f"{text},codes=true" if codes else text)
        arguments = op.inputs(op.problem(text), 0, "cpu")
        if codes:
            at = [argument.name for argument in op.arguments].index("codes")
            given, scales = codes_of(arguments[0], form)
            arguments[at : at + 2] = given, scales.T.contiguous().T if by_column else scales
            arguments[0] = torch.full_like(arguments[0], float("nan"))
        out = torch.empty(9, 40 if op.name == "linear" else 288, dtype=torch.bfloat16)
        call = op.Call(*pack(implementation.kernel, arguments), out)
        assert op.guard(op.static(problem))(call) == 9
        load(implementation.kernel)(implementation.kernel.config(problem, implementation.target), call)
        made.append(out)
    return made


@pytest.mark.parametrize("by_column", [False, True], ids=["by row", "by column"])
@pytest.mark.parametrize("implementation", TAKING, ids=str)
def test_the_result_is_that_of_x(implementation: Runnable, by_column: bool) -> None:
    """In every format, with scales in the order of rows or of groups."""
    ran = 0
    for form, weight in WEIGHTS.items():
        text = f"{SIZES[implementation.op.name]},w={weight}.{form},codes=true"
        if form == "fp8" and implementation.op.name == "moe":
            continue  # one scale for all tokens
        if implementation.kernel.accepts(implementation.op.problem(text)) is None:
            expected, out = results(implementation, form, by_column)
            assert torch.equal(out, expected) and bool(out.isfinite().all()), form
            ran += 1
    assert ran > 1 or implementation.kernel.name == "linear_a8_groups_cpu"


def test_what_is_refused() -> None:
    x, weight = torch.randn(4, 256), quantize(torch.randn(8, 256), "fp8_ch.fp8_token")
    codes, scales = codes_of(x, "fp8_token")
    cases: list[tuple[Any, Any, Any, str]] = [
        (weight, codes, None, "codes and scales are given together"),
        (weight, None, scales, "codes and scales are given together"),
        (weight, codes.view(torch.int8), scales, "codes of fp8_token must be fp8, got torch.int8"),
        (weight, codes, scales.repeat(1, 2), r"scales of fp8_token must be \[4, 1\], got \[4, 2\]"),
        (weight, codes[:3], scales, r"codes must be \[..., k\]"),
        (quantize(torch.randn(8, 256), "fp8_ch"), codes, scales, "a weight in fp8_ch takes floats"),
    ]
    for stored, given_codes, given_scales, message in cases:
        with pytest.raises(ValueError, match=message):
            LINEAR.describe(x, stored, None, None, False, 0, None, given_codes, given_scales)
    with pytest.raises(TypeError, match="scales must be torch.float32"):
        LINEAR.describe(x, weight, None, None, False, 0, None, codes, scales.double())
    with pytest.raises(ValueError, match="a weight in bf16 takes floats"):
        LINEAR.problem("n=8,k=256,codes=true")
    with pytest.raises(ValueError, match="a weight in fp32 takes floats"):
        ops.linear(x, [torch.randn(8, 256)], codes=codes, scales=scales)


FAULT, LAYOUT = "m=9,n=40,k=288,w=fp8_block.fp8_g128,codes=true", "plain_v1"


def stored_weight(tensors: Any) -> QuantTensor:
    """The weight of FAULT, of its tensors in LAYOUT."""
    slots = dict(zip(REGISTRY.layout(LAYOUT).slots, tensors, strict=True))
    return unpack(Packed(LAYOUT, QuantScheme.parse("fp8_block.fp8_g128"), (40, 288), slots))


@positional
def right(config: Any, x: Any, weight: Any, *rest: Any) -> None:
    rest[-1].copy_(LINEAR.reference(x, stored_weight(weight), *rest[:-1]))


@positional
def scale_of_the_next_row(config: Any, x: Any, weight: Any, *rest: Any) -> None:
    *more, codes, scales, out = rest
    out.copy_(LINEAR.reference(x, stored_weight(weight), *more, codes, scales.roll(1, 0)))


@positional
def group_of_the_next_columns(config: Any, x: Any, weight: Any, *rest: Any) -> None:
    *more, codes, scales, out = rest
    out.copy_(LINEAR.reference(x, stored_weight(weight), *more, codes, scales.roll(1, 1)))


@positional
def values_of_x(config: Any, x: Any, weight: Any, *rest: Any) -> None:
    rest[-1].copy_(LINEAR.reference(x, stored_weight(weight), *rest[:-3]))


@pytest.mark.parametrize("fault", ["scale_of_the_next_row", "group_of_the_next_columns", "values_of_x"])
def test_verification_catches(fault: str) -> None:
    assert not verify_fault("linear", __name__, fault, FAULT, LAYOUT).ok
    assert verify_fault("linear", __name__, "right", FAULT, LAYOUT).ok


def test_a_norm_that_is_not_the_one_quantized_shows() -> None:
    op = REGISTRY.op("rms_norm_quant")
    problem = op.problem("m=5,n=300,residual=true,normed=true")
    arguments = op.inputs(problem, 0, "cpu")
    op.reference(*arguments)
    x, residual, weight, eps, codes, scales, form, normed = arguments
    call = op.inputs(problem, 0, "cpu")
    limit = op.tolerance(problem).limit
    assert (
        op.error(problem, call, (residual, codes, scales, normed), (residual, codes, scales, normed)) <= limit
    )
    off = normed.clone()
    off[3, 7] *= 1.02
    assert op.error(problem, call, (residual, codes, scales, off), (residual, codes, scales, normed)) > limit
