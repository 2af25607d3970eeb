"""linear: the reference against float64, every kernel and scheme with one-hot rows, planted faults, layouts,
plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import kernel_arguments, verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.problem import AxisError
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.weight import LinearWeight, problem_of
from gristmill.kernels.load import load
from gristmill.quant import QuantTensor, quantize
from gristmill.quant.packed import pack
from gristmill.quant.sharding import concat
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.native.levels import runnable_levels

REGISTRY = default_registry()
OP = REGISTRY.op("linear")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
QUANTIZED = [name for name in ALL_WEIGHT_SCHEMES if not QuantScheme.parse(name).is_dense]
LEVELS = [level for level in runnable_levels() if level != "avx512_vnni"]


def named(name: str) -> Kernel:
    return REGISTRY.kernel("linear", name)


def run(
    kernel: Kernel,
    problem: str,
    x: torch.Tensor,
    weight: Any,
    *,
    layout: str | None = None,
    level: str = "",
    bias: Any = None,
    residual: Any = None,
    silu_mul: bool = False,
) -> torch.Tensor:
    """Launches the kernel once into a poisoned output."""
    actual = OP.problem(problem)
    config = kernel.config(actual, Target.parse(f"cpu:{level or LEVELS[-1]}"))
    if layout is None:
        tensors = kernel_arguments(OP, kernel, [x, weight])[1]
    else:
        tensors = pack(weight, layout).tensors
    ((shape, dtype),) = OP.like(x, [], bias, residual, silu_mul, weight.n)
    out = torch.full(shape, float("nan"), dtype=dtype)
    load(kernel)(config, make_call("linear", x, tensors, bias, residual, silu_mul, weight.n, None, out))
    return out


def weight_of(scheme: str, n: int, k: int, seed: int = 0, **options: Any) -> QuantTensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * torch.exp(torch.randn(n, 1, generator=generator)) / k**0.5
    return quantize(w, scheme, **options)


def k_for(scheme: str) -> int:
    return (
        256
        if "g128" in scheme
        else 128
        if "g64" in scheme
        else 96
        if QuantScheme.parse(scheme).requires_k_multiple > 1
        else 77
    )


@pytest.mark.parametrize("text", [t for t in OP.examples if "m=0" not in t])
def test_reference_is_float64_rounded_once(text: str) -> None:
    problem = OP.problem(text)
    x, weight, bias, residual, silu_mul, n, _, codes, scales = arguments = OP.inputs(problem, 3, "cpu")
    x64 = x.double()
    if codes is not None:
        groups = {"fp8_g128": 128, "int8_g32": 32}.get(str(weight.scheme.activation), weight.k)
        of_columns = scales.double().repeat_interleave(groups, 1)[:, : weight.k]
        x64 = codes.double() * of_columns
    elif weight.scheme.activation is not None:
        from gristmill.quant.activations import quantize_activation

        x64 = quantize_activation(x, weight.scheme.activation).dequantize().double()
    z = x64 @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    if silu_mul:
        z = z[:, : n // 2] / (1 + torch.exp(-z[:, : n // 2])) * z[:, n // 2 :]
    z = z + (0 if residual is None else residual.double())
    out = OP.reference(*arguments)
    assert out.dtype == x.dtype
    ulp = {"fp32": 2**-18, "fp16": 2**-11, "bf16": 2**-8}[problem.text("x")]
    torch.testing.assert_close(out.double(), z, rtol=ulp, atol=1e-5)


def identity_rows(kernel: Kernel, scheme: str, name: str, level: str = "", layout: str | None = None) -> None:
    n, k, dtype = 35, k_for(scheme), DTYPES[name]
    act_order = scheme.startswith("int4_g32")
    g_idx = (
        (torch.arange(k) // 32)[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
        if act_order
        else None
    )
    weight = weight_of(scheme, n, k, g_idx=g_idx)
    out = run(
        kernel,
        f"m={k},n={n},k={k},x={name},w={scheme}",
        torch.eye(k, dtype=dtype),
        weight,
        level=level,
        layout=layout,
    )
    expected = weight.dequantize().T.to(dtype)
    assert torch.equal(out, expected), (
        f"{(out != expected).sum()} of {expected.numel()} differ, max {(out - expected).abs().max()}"
    )
    two_rows = torch.eye(k, dtype=dtype)[[0, k - 1]]
    out = run(kernel, f"m=2,n={n},k={k},x={name},w={scheme}", two_rows, weight, level=level, layout=layout)
    assert torch.equal(out, expected[[0, k - 1]])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("scheme", ALL_WEIGHT_SCHEMES)
@pytest.mark.parametrize("level", LEVELS)
def test_one_hot_gives_the_weight_cpu(level: str, scheme: str, name: str) -> None:
    identity_rows(named("linear_cpu"), scheme, name, level)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("layout", ["plain_v1", "cpu_rows16_v1"])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_one_hot_gives_the_weight_torch(scheme: str, layout: str, name: str) -> None:
    identity_rows(named("linear_dequant_torch"), scheme, name, layout=layout)


@pytest.mark.skipif(HAS_GPU, reason="with a GPU here Triton kernels run on it, in the gpu tests")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("scheme", ALL_WEIGHT_SCHEMES)
def test_one_hot_gives_the_weight_triton(scheme: str, name: str) -> None:
    dense = QuantScheme.parse(scheme).is_dense
    identity_rows(named("linear_triton" if dense else "linear_w_triton"), scheme, name)


@pytest.mark.parametrize("scheme", ["bf16", "fp16", "fp32"])
def test_one_hot_gives_the_weight_dense_torch(scheme: str) -> None:
    identity_rows(named("linear_torch"), scheme, scheme)


@pytest.mark.parametrize("kernel", ["linear_dequant_torch", "linear_w_triton", "linear_cpu"])
def test_float_zeros_half_scales_segments_and_cut_blocks(kernel: str) -> None:
    """Values that checkpoints and shards contain, but that rounding to nearest does not produce."""
    if HAS_GPU and "triton" in kernel:
        pytest.skip("with a GPU here Triton kernels run on it, in the gpu tests")
    base = weight_of("int4_g32_zp", 20, 96)
    odd = replace(base, zero=base.zero.float() + 0.37, scales=base.scales.to(torch.float16))
    sixteen = replace(base, zero=torch.full_like(base.zero, 16))
    fused = concat([weight_of("nvfp4", n, 96, seed=n) for n in (24, 17)], -2)
    fp8 = concat([weight_of("fp8", n, 96, seed=n) for n in (5, 30)], -2)
    blocks = concat([weight_of("fp8_block", n, 200, seed=n) for n in (130, 40)], -2)
    cut = weight_of("int4_g128_zp", 33, 512).narrow(-1, 64, 256)
    for weight in (odd, sixteen, fused, fp8, blocks, cut):
        for name, m in (("fp32", 3), ("bf16", 19)):
            x = torch.randn(m, weight.k, generator=torch.Generator().manual_seed(5)).to(DTYPES[name])
            act_order = str(weight.g_idx is not None).lower()
            text = f"m={m},n={weight.n},k={weight.k},x={name},w={weight.scheme},act_order={act_order}"
            out = run(named(kernel), text, x, weight)
            reference = OP.reference(x, weight)
            problem = OP.problem(text)
            assert (
                error_of(OP, problem, [x, weight, None, None, False], [out], [reference])
                <= OP.tolerance(problem).limit
            )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("scheme", "name"), [("int4_g32_zp", "bf16"), ("nvfp4", "fp32"), ("bf16", "bf16"), ("fp8_ch", "fp16")]
)
def test_cpu_rows_do_not_depend_on_the_batch_or_threads(level: str, scheme: str, name: str) -> None:
    n, k = 70, 544
    weight = weight_of(scheme, n, k)
    x = torch.randn(300, k, generator=torch.Generator().manual_seed(2)).to(DTYPES[name])
    one = torch.cat(
        [
            run(named("linear_cpu"), f"m=1,n={n},k={k},x={name},w={scheme}", row[None], weight, level=level)
            for row in x[:20]
        ]
    )
    before = torch.get_num_threads()
    try:
        for m, threads in ((2, 1), (3, 2), (5, 1), (8, 2), (9, 1), (12, 2), (20, 1), (300, 2)):
            torch.set_num_threads(threads)
            text = f"m={m},n={n},k={k},x={name},w={scheme}"
            out = run(named("linear_cpu"), text, x[:m], weight, level=level)
            assert torch.equal(out[:20], one[:m]), f"{m} rows, {threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ["linear_cpu", "linear_dequant_torch", "linear_w_triton"])
def test_strided_rows_are_read_in_place(kernel: str) -> None:
    if HAS_GPU and "triton" in kernel:
        pytest.skip("with a GPU here Triton kernels run on it, in the gpu tests")
    weight = weight_of("int4_ch", 21, 77)
    padded = torch.full((5, 77 + 9), float("nan"))
    padded[:, :77] = torch.randn(5, 77)
    out = run(named(kernel), "m=5,n=21,k=77,x=fp32,w=int4_ch", padded[:, :77], weight)
    torch.testing.assert_close(out, OP.reference(padded[:, :77].contiguous(), weight), rtol=1e-4, atol=1e-5)


FAULTS = [
    "scale doubled",
    "nibbles swapped",
    "zero off by one",
    "K tail skipped",
    "row unwritten",
    "row off by one",
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scheme", ["int4_g128_zp", "nvfp4", "mxfp4"])
def test_planted_faults_are_seen(fault: str, scheme: str) -> None:
    """The check fails for a kernel that is wrong in one place, at the K of a real layer."""
    if fault == "zero off by one" and not scheme.endswith("zp"):
        return
    n, k, m = 40, 4096, 257
    problem = OP.problem(f"m={m},n={n},k={k},x=bf16,w={scheme}")
    arguments = OP.inputs(problem, 0, "cpu")
    x, weight = arguments[:2]
    right = OP.reference(*arguments)
    wrong_weight = weight
    if fault == "scale doubled":
        scales = weight.scales.clone()
        if scales.dtype == torch.uint8:
            scales[7, 3] += 1
        else:
            scales[7, 3] = (scales[7, 3].float() * 2).clamp(max=448).to(scales.dtype)
            scales[7, 3] = scales[7, 3] if scales[7, 3].float() != weight.scales[7, 3].float() else 224.0
        wrong_weight = replace(weight, scales=scales)
    elif fault == "nibbles swapped":
        codes = weight.codes.clone()
        group = (weight.scheme.group_size or 0) // 2
        codes[3, :group] = (codes[3, :group] >> 4) | (codes[3, :group] << 4)
        wrong_weight = replace(weight, codes=codes)
    elif fault == "zero off by one":
        zero = weight.zero.clone()
        zero[5, 9] += 1
        wrong_weight = replace(weight, zero=zero)
    wrong = OP.reference(x, wrong_weight)
    if fault == "K tail skipped":
        short = x.clone()
        short[:, -16:] = 0
        wrong = OP.reference(short, weight)
    elif fault == "row unwritten":
        wrong[100] = 0
    elif fault == "row off by one":
        wrong[100] = right[99]
    limit = OP.tolerance(problem).limit
    assert error_of(OP, problem, arguments, [right], [right]) == 0
    assert error_of(OP, problem, arguments, [wrong], [right]) > 3 * limit


def test_an_unwritten_or_overrun_output_fails_verification() -> None:
    kernel = named("linear_dequant_torch")
    problem = OP.problem("m=5,n=18,k=64,x=fp32,w=int4_g32")
    good = verify(OP, kernel, kernel.config(problem, Target.parse("cpu:base")), problem, "cpu")
    assert good.ok, good.reason
    forgetful = replace(kernel, target=f"{__name__}:skips_last_row")
    bad = verify(OP, forgetful, {"scheme": "int4_g32"}, problem, "cpu")
    assert not bad.ok


def skips_last_row(
    config: Any,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    silu_mul: bool,
    n: int,
    workspace: Any,
    out: Any,
) -> None:
    named("linear_dequant_torch").load()(
        config, make_call("linear", x[:-1], weight, bias, residual, silu_mul, n, workspace, out[:-1])
    )


def test_bad_arguments_say_what_is_wrong() -> None:
    x, w = torch.randn(3, 8), torch.randn(6, 8)
    cases = [
        (
            (torch.randn(3, 9), [w]),
            ValueError,
            r"weight must be \[n, k\] = \[6, 9\], k as in x, got \[6, 8\]",
        ),
        ((x, [torch.randn(8, 6).T]), ValueError, "contiguous"),
        ((x.double(), [w]), TypeError, "x must be"),
        ((x.T.contiguous().T, [w]), ValueError, "x must be contiguous"),
        ((x, [w, w]), ValueError, "from which the scheme cannot be derived"),
        ((x, [w], torch.randn(7)), ValueError, r"bias must be \[n\] = \[6\], n as in weight, got \[7\]"),
        ((x, [w], torch.randn(6).bfloat16()), TypeError, "bias must have"),
        ((x, [w], None, torch.randn(3, 7)), ValueError, r"residual must be .* = \[3, 6\], .*got \[3, 7\]"),
        ((x, [torch.randn(5, 8)], None, None, True), ValueError, "even number"),
        ((x, [w], None, None, False, 4), ValueError, "n must be 0 or the n of the weight, 6, got 4"),
        ((x, [w.to(torch.uint8)]), TypeError, "quantized weights need a plan"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            OP.describe(*arguments)
    with pytest.raises(AxisError, match="w"):
        OP.problem("m=1,n=8,k=8,w=int9_g128")
    with pytest.raises(ValueError, match="multiple"):
        quantize(torch.randn(8, 100), "int4_g128")


def parts(scheme: str) -> tuple[Any, ...]:
    """What the tensors of a weight tell about its scheme."""
    codes, *others = pack(weight_of(scheme, 32, 256), "cpu_rows16_v1").tensors
    return tuple(codes.shape), [(tuple(one.shape), one.dtype) for one in others if one.numel()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("planned", ALL_WEIGHT_SCHEMES)
def test_tensors_of_another_scheme_are_refused(planned: str, level: str) -> None:
    """By name, wherever they tell it: scales and zero points that are there, or not, and their sizes and dtypes."""
    x = torch.randn(2, 256)
    problem = f"m=2,n=32,k=256,x=fp32,w={planned}"
    for given in ALL_WEIGHT_SCHEMES:
        mine, other = parts(planned), parts(given)
        weight = weight_of(given, 32, 256)
        if same_parts(mine, other):
            run(named("linear_cpu"), problem, x, weight, layout="cpu_rows16_v1", level=level)
            continue
        with pytest.raises(ValueError, match="^linear_cpu: .*(own scheme|do not pack a)") as raised:
            run(named("linear_cpu"), problem, x, weight, layout="cpu_rows16_v1", level=level)
        if mine[0] == other[0]:
            assert "planned for a scheme with" in str(raised.value), f"{planned} took {given}"


def same_parts(mine: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether they are alike, but for the dtype of scales that are floats."""

    def plain(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        floats = DTYPES.values()
        return parts[0], [(shape, "float" if dtype in floats else dtype) for shape, dtype in parts[1]]

    return plain(mine) == plain(other)


def test_planned_calls(policy_file: Any) -> None:
    """The life of a layer: plan, pack for its layouts, call with several sizes, leading dimensions and
    epilogues, refuse bad calls."""
    policy_file('pins = { linear = ["linear_cpu"] }\nstrict = true')
    n, k = 96, 256
    weight = weight_of("int4_g128", n, k)
    text = problem_of("int4_g128", n, k, "bf16", bias=True, silu_mul=True)
    resolver = ops.resolver("cpu")
    plan = resolver.plan(OP, OP.problem(text), sizes=(1, 8, 16))
    assert plan.layouts == ("cpu_rows16_v1",)
    packed = LinearWeight.pack(weight, plan.layouts)
    assert OP.problem(packed.problem("bf16", bias=True, silu_mul=True)) == OP.problem(text)
    bound = ops.bind("linear", text, "cpu", layouts=frozenset(plan.layouts)).adopt(plan)
    bias = torch.randn(n).bfloat16()
    for shape in ((k,), (1, k), (2, 5, k), (16, k), (0, k)):
        x = torch.randn(shape).bfloat16()
        out = ops.linear(x, packed.tensors(), bias, None, True, n, plan=bound)
        expected = OP.reference(x, weight, bias, None, True)
        assert out.shape == expected.shape
        torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
    x = torch.randn(2, k).bfloat16()
    with pytest.raises(ValueError, match="planned for"):
        ops.linear(x.float(), packed.tensors(), bias.float(), None, True, n, plan=bound)
    with pytest.raises(ValueError, match="bias must be given, got None"):
        ops.linear(x, packed.tensors(), None, None, True, n, plan=bound)
    with pytest.raises(
        ValueError, match="weight must begin with a contiguous tensor of at least 12288 bytes on cpu"
    ):
        ops.linear(
            x,
            LinearWeight.pack(weight_of("int4_g128", 32, k), plan.layouts).tensors(),
            bias,
            None,
            True,
            n,
            plan=bound,
        )
    with pytest.raises(ValueError, match="not as plain_v1"):
        packed.tensors("plain_v1")


def test_automatic_call_takes_a_dense_weight(policy_file: Any) -> None:
    policy_file()
    x, w, bias = torch.randn(2, 3, 40), torch.randn(12, 40), torch.randn(12)
    torch.testing.assert_close(
        ops.linear(x, [w], bias), torch.nn.functional.linear(x, w, bias), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        ops.linear(x, [w], silu_mul=True), OP.reference(x, w, None, None, True), rtol=1e-5, atol=1e-5
    )


LIBRARIES = {"humming_v1": {"linear_humming"}, "tinygemm_v1": {"linear_int4_torch"}}
"""Layouts that belong to a wrapped library; no other kernel reads them."""


def test_two_kernels_read_each_layout() -> None:
    readers: dict[str, set[str]] = {}
    for kernel in REGISTRY.kernels_of("linear"):
        for layout in kernel.layouts:
            readers.setdefault(layout, set()).add(kernel.name)
    assert {layout: readers.pop(layout) for layout in LIBRARIES} == LIBRARIES
    assert all(len(names) >= 2 for names in readers.values()), readers
    assert set(readers) >= {"plain_v1", "cpu_rows16_v1", "dense_v1"}
