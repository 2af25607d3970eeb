"""linear with int8 activations: against float64 within the rounding of sums, extremes of codes, non-finite rows, planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.op import OP
from gristmill.kernels.load import load
from gristmill.quant import QuantTensor, pack, quantize, quantize_activation
from tests.native.levels import runnable_levels

KERNEL = default_registry().kernel("linear", "linear_a8_cpu")
LEVELS = [level for level in runnable_levels() if level != "avx512_bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHTS = (
    *(f"int4_{group}{zero}" for group in ("g32", "g64", "g128", "ch") for zero in ("", "_zp")),
    "int8_ch",
    "int8_g128",
    "mxfp4",
    "nvfp4",
)
ACTIVATIONS = ("int8_token", "int8_g32", "int8_g128")


def weight_of(scheme: str, n: int, k: int, seed: int = 0) -> QuantTensor:
    """A random weight whose rows have very different sizes; K need not be a multiple of the group."""
    parsed = QuantScheme.parse(scheme)
    generator = torch.Generator().manual_seed(seed)
    multiple = parsed.requires_k_multiple
    whole = -(-k // multiple) * multiple
    sizes = torch.exp(torch.randn(n, 1, generator=generator))
    weight = quantize(torch.randn(n, whole, generator=generator) * sizes, parsed.without_activation)
    weight = weight if whole == k else weight.narrow(-1, 0, k)
    return replace(weight, scheme=replace(weight.scheme, activation=parsed.activation))


def run(weight: QuantTensor, x: torch.Tensor, level: str = LEVELS[-1], **options: Any) -> torch.Tensor:
    """One launch with the output poisoned."""
    name = next(name for name, dtype in DTYPES.items() if dtype == x.dtype)
    text = f"m={x.shape[0]},n={weight.n},k={weight.k},x={name},w={weight.scheme}"
    problem = OP.problem(text + f",act_order={str(weight.g_idx is not None).lower()}")
    assert KERNEL.accepts(problem) is None
    silu_mul = options.get("silu_mul", False)
    out = torch.full((x.shape[0], weight.n // (1 + silu_mul)), float("nan"), dtype=x.dtype)
    load(KERNEL)(
        KERNEL.config(problem, Target.parse(f"cpu:{level}")),
        OP.Call(
            x,
            pack(weight, "cpu_rows16_v1").tensors,
            options.get("bias"),
            options.get("residual"),
            silu_mul,
            weight.n,
            out=out,
        ),
    )
    return out


def exact(weight: QuantTensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of the sizes of its terms."""
    act = quantize_activation(x, weight.scheme.activation or "").dequantize().double()
    dequantized = weight.dequantize().double()
    return act @ dequantized.T, act.abs() @ dequantized.abs().T


def assert_exact(out: torch.Tensor, weight: QuantTensor, x: torch.Tensor) -> None:
    """Only the addition of units and the output are rounded."""
    product, size = exact(weight, x)
    rounding = {torch.float32: 2e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}[out.dtype]
    excess = (out.double() - product).abs() - rounding * product.abs() - 5e-7 * size
    assert not out.isnan().any() and bool((excess <= 0).all()), f"{int((excess > 0).sum())} of {out.numel()}"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("level", LEVELS)
def test_only_the_addition_of_units_is_rounded(level: str, weight: str, activation: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for m, n, k in (
        (1, 1, 1),
        (1, 35, 257),
        (2, 7, 77),
        (4, 16, 129),
        (7, 257, 96),
        (8, 33, 640),
        (13, 16, 300),
    ):
        packed = weight_of(f"{weight}.{activation}", n, k, seed=m)
        x = torch.randn(m, k, generator=generator) * torch.exp2(torch.arange(m) % 9 - 4.0)[:, None]
        assert_exact(run(packed, x, level), packed, x)


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_with_an_epilogue(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    n, k = 70, 200
    for scheme in ("int4_g32.int8_g32", "int8_ch.int8_token", "nvfp4.int8_g32"):
        weight = weight_of(scheme, n, k)
        for m in (1, 7):
            x = torch.randn(m, k, generator=generator).to(DTYPES[name])
            bias = torch.randn(n, generator=generator).to(DTYPES[name])
            residual = torch.randn(m, n // 2, generator=generator).to(DTYPES[name])
            out = run(weight, x, bias=bias, residual=residual, silu_mul=True)
            problem = OP.problem(f"m={m},n={n},k={k},x={name},w={scheme},epilogue=bias+residual+silu_mul")
            arguments = [x, weight, bias, residual, True]
            assert (
                error_of(OP, problem, arguments, [out], [OP.reference(*arguments)])
                <= OP.tolerance(problem).limit
            )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", ["int4_ch.int8_token", "int8_ch.int8_token", "mxfp4.int8_g32"])
def test_the_largest_codes_do_not_overflow(level: str, scheme: str) -> None:
    """Every code at its end and x at +-127: sums of int16 are at their bound, those of int32 far from theirs."""
    n, k = 16, 16384
    weight = weight_of(scheme, n, k)
    for code in (0x00, 0xFF, 0x77):
        full = replace(weight, codes=torch.full_like(weight.codes, code))
        x = torch.ones(7, k)
        x[1::2] = -1
        x[2, ::2] = -1
        assert_exact(run(full, x, level), full, x)
        assert_exact(run(full, x[:2], level), full, x[:2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", ["int4_g32_zp.int8_token", "int8_g128.int8_g128", "nvfp4.int8_g32"])
def test_rows_do_not_depend_on_the_batch_or_threads(level: str, scheme: str) -> None:
    n, k = 150, 544
    weight = weight_of(scheme, n, k)
    x = torch.randn(300, k, generator=torch.Generator().manual_seed(2)).bfloat16()
    one = torch.cat([run(weight, row[None], level) for row in x[:20]])
    before = torch.get_num_threads()
    try:
        for m, threads in ((2, 1), (3, 2), (5, 1), (8, 2), (12, 2), (20, 1), (300, 2)):
            torch.set_num_threads(threads)
            assert torch.equal(run(weight, x[:m], level)[:20], one[:m]), f"{m} rows, {threads} threads"
    finally:
        torch.set_num_threads(before)


def test_strided_rows_are_read_in_place() -> None:
    weight = weight_of("int4_ch.int8_g32", 21, 77)
    wide = torch.full((5, 77 + 9), float("nan"))
    wide[:, :77] = torch.randn(5, 77)
    assert_exact(run(weight, wide[:, :77]), weight, wide[:, :77].contiguous())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_non_finite_rows_are_nan_and_no_others(activation: str, value: float) -> None:
    weight = weight_of(f"int4_g128.{activation}", 35, 300)
    x = torch.randn(7, 300)
    expected = run(weight, x)
    x[3, 290] = value
    out = run(weight, x)
    assert bool(out[3].isnan().all())
    assert torch.equal(out[[0, 1, 2, 4, 5, 6]], expected[[0, 1, 2, 4, 5, 6]])


def test_rows_of_zeros_and_small_numbers() -> None:
    weight = weight_of("int8_g128.int8_g128", 35, 300)
    x = torch.zeros(3, 300)
    assert torch.equal(run(weight, x), torch.zeros(3, 35))
    x[1] = 1e-12
    x[2] = 1e30
    assert_exact(run(weight, x), weight, x)


def test_act_order_with_whole_rows_of_x() -> None:
    k = 96
    g_idx = (torch.arange(k) // 32)[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    weight = quantize(torch.randn(20, k), "int4_g32_zp", g_idx=g_idx)
    weight = replace(weight, scheme=QuantScheme.parse("int4_g32_zp.int8_token"))
    for m in (1, 9):
        x = torch.randn(m, k)
        assert_exact(run(weight, x), weight, x)


def test_zeros_and_scales_of_checkpoints() -> None:
    """Float zeros, float16 scales, and the integer zero 16: what round to nearest does not make."""
    base = weight_of("int4_g32_zp.int8_g32", 20, 96)
    for weight in (
        replace(base, zero=base.zero.float() + 0.37, scales=base.scales.to(torch.float16)),
        replace(base, zero=torch.full_like(base.zero, 16)),
    ):
        for m in (1, 7):
            x = torch.randn(m, 96)
            assert_exact(run(weight, x), weight, x)


@pytest.mark.parametrize(
    "scheme, act_order, message",
    [
        ("int4_g128", False, "takes activations of int8_token, int8_g32, int8_g128, not their own dtype"),
        ("int4_g128.fp8_token", False, "not fp8_token"),
        ("fp8_block.int8_token", False, "decodes the schemes of ALL_WEIGHT_SCHEMES of int4, int8"),
        ("int3_g128.int8_token", False, "not int3_g128.int8_token"),
        ("int4_g128.int8_g128", True, "which act_order separates"),
    ],
)
def test_refusals_say_why(scheme: str, act_order: bool, message: str) -> None:
    problem = OP.problem(f"m=1,n=32,k=256,w={scheme},act_order={str(act_order).lower()}")
    assert message in str(KERNEL.accepts(problem))


def test_a_weight_of_another_size_is_refused() -> None:
    weight, other = weight_of("int4_g128.int8_g128", 32, 256), weight_of("int4_g128.int8_g128", 48, 256)
    problem = OP.problem(f"m=1,n=32,k=256,x=fp32,w={weight.scheme}")
    with pytest.raises(ValueError, match=r"linear_a8_cpu: codes .* do not pack a \[32, 256\] weight"):
        load(KERNEL)(
            KERNEL.config(problem, Target.parse("cpu:base")),
            OP.Call(
                torch.randn(1, 256),
                pack(other, "cpu_rows16_v1").tensors,
                None,
                None,
                False,
                32,
                out=torch.empty(1, 32),
            ),
        )


@pytest.mark.parametrize("fault", ["scale of x doubled", "zero off by one", "block of x of its neighbour"])
def test_planted_faults_are_seen(fault: str) -> None:
    weight = weight_of("int4_g128_zp.int8_g128", 40, 4096)
    x = torch.randn(5, 4096)
    wrong = weight
    act = quantize_activation(x, "int8_g128")
    scales = act.scales.clone()
    if fault == "scale of x doubled":
        scales[2, 7] *= 2
    elif fault == "block of x of its neighbour":
        scales[2, 7] = scales[2, 8]
    else:
        zero = weight.zero.clone()
        zero[5, 9] += 1
        wrong = replace(weight, zero=zero)
    out = replace(act, scales=scales).dequantize() @ wrong.dequantize().T
    with pytest.raises(AssertionError):
        assert_exact(out, weight, x)
    assert_exact(run(weight, x), weight, x)


@pytest.mark.parametrize(
    "text", ["m=7,n=66,k=96,x=fp32,w=int4_g32.int8_g32", "m=1,n=35,k=300,w=int8_ch.int8_token"]
)
def test_verification_passes(text: str) -> None:
    problem = OP.problem(text)
    outcome = verify(OP, KERNEL, KERNEL.config(problem, Target.parse(f"cpu:{LEVELS[-1]}")), problem, "cpu")
    assert outcome.ok, outcome.reason
