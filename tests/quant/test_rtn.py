"""Round to nearest: groups computed by hand, a second implementation in numpy, planted faults, invalid input."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import QuantTensor, numeric, quantize, rtn
from gristmill.quant.tensor import same_bits
from tests import forked
from tests.quant.oracle import QUANTIZED, act_order, round_trip, weight


def check_rounding(q: QuantTensor, w: torch.Tensor) -> None:
    """Checks that every weight equals the oracle's bit for bit (-0 equals 0)."""
    expected = round_trip(w.numpy(), q.scheme.weights)
    assert np.array_equal(q.dequantize().numpy(), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_scheme_is_the_oracle(name: str) -> None:
    w = weight(150, 384)
    check_rounding(quantize(w, name), w)


@pytest.mark.parametrize("name", ["fp8", "fp8_ch", "fp8_block", "int4_ch", "int4_ch_zp", "int8_ch"])
def test_any_k(name: str) -> None:
    w = weight(131, 137)
    check_rounding(quantize(w, name), w)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("power", [-140, -126, -60, 60, 120])
def test_extreme_magnitudes(name: str, power: int) -> None:
    """Subnormal and huge weights stay finite, and their error is at most one rounding (or less than the
    format's smallest scale)."""
    w = (torch.randn(33, 128, generator=torch.Generator().manual_seed(3)).clamp(-3, 3) * 2.0**power).clamp(
        -3e38, 3e38
    )
    d = quantize(w, name).dequantize()
    assert bool(torch.isfinite(d).all())
    assert float((d - w).abs().max()) <= 0.27 * float(w.abs().max()) + 2.0**-124


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("fault", ["scale", "nibble", "row"])
def test_planted_faults_are_seen(name: str, fault: str) -> None:
    w = weight(150, 384, 1)
    q = quantize(w, name)
    codes, scales, top = q.codes.clone(), None if q.scales is None else q.scales.clone(), q.global_scale
    if fault == "scale" and scales is None:
        top = q.global_scale * 2
    elif fault == "scale" and scales.dtype == torch.uint8:
        scales[1, 0] += 1
    elif fault == "scale":
        scales[1, 0] = scales[1, 0].float() * 2
    elif fault == "nibble":
        swapped = (codes << 4) | (codes >> 4)
        # More than the sign of a zero differs.
        n, byte = (int(i) for i in ((swapped & 7) != (codes & 7)).nonzero()[100])
        codes[n, byte] = swapped[n, byte]
    else:
        codes[[2, 3]] = codes[[3, 2]]
    broken = dataclasses.replace(q, codes=codes, scales=scales, global_scale=top)
    with pytest.raises(AssertionError):
        check_rounding(broken, w)


def test_int4_by_hand() -> None:
    # amax 7 -> scale 1; 0.5, 1.5 and 2.5 are ties; symmetric scales reach code -8 only by rounding
    w = torch.zeros(1, 32)
    w[0, :9] = torch.tensor([7.0, -7, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4, -3.6])
    q = quantize(w, "int4_g32")
    assert q.scales.dtype == torch.bfloat16 and q.scales.tolist() == [[1.0]]
    assert (q.unpacked()[0, :10].int() - 8).tolist() == [7, -7, 0, 2, 2, 0, -2, 3, -4, 0]
    assert q.codes[0, 0].item() == 15 | 1 << 4  # low nibble is k = 0


def test_int4_scale_is_rounded_to_bf16() -> None:
    w = torch.full((1, 32), 1.0)
    q = quantize(w, "int4_g32")
    assert float(q.scales) == float(torch.tensor(1 / 7).bfloat16())
    # round(1 / bf16(1/7)) = 7
    assert (q.unpacked().int() - 8).unique().tolist() == [7]


def test_int4_zero_points_by_hand() -> None:
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([-5.0, 10.0, 0.5, 1.5])
    q = quantize(w, "int4_g32_zp")
    assert (q.scales.item(), q.zero.item()) == (1.0, 5)
    assert q.zero.dtype == torch.uint8
    assert q.unpacked()[0, :5].tolist() == [0, 15, 5, 7, 5]
    positive = quantize(torch.full((1, 32), 3.0), "int4_g32_zp")
    assert positive.zero.item() == 0 and positive.unpacked().unique().tolist() == [15]


def test_mxfp4_by_hand() -> None:
    # amax 7.9: floor(log2) = 2, exponent 0, and 7.9 saturates at 6
    w = torch.zeros(1, 32)
    w[0, :6] = torch.tensor([7.9, -2.5, 0.25, 0.75, 5.0, 3.5])
    q = quantize(w, "mxfp4")
    assert q.scales.tolist() == [[127]]
    assert q.dequantize()[0, :6].tolist() == [6, -2, 0, 1, 4, 4]
    assert quantize(w * 2**-5, "mxfp4").scales.tolist() == [[122]]
    assert quantize(w * 0, "mxfp4").scales.tolist() == [[0]]


def test_mxfp8_by_hand() -> None:
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1] = 511.0, 17.0  # 511: exponent 0, saturates; 17 is a tie between 16 and 18
    q = quantize(w, "mxfp8")
    assert q.scales.tolist() == [[127]]
    assert q.dequantize()[0, :2].tolist() == [448, 16]


def test_nvfp4_by_hand() -> None:
    w = torch.zeros(2, 16)
    w[0, 0], w[1, 0], w[1, 1] = 6 * 448.0, 6.0, 2.5
    q = quantize(w, "nvfp4")
    assert q.global_scale.tolist() == [1.0]
    assert q.scales.dtype == torch.float8_e4m3fn
    assert q.scales.float().tolist() == [[448], [1]]
    assert q.dequantize()[1, :2].tolist() == [6, 2]
    tiny = w.clone()
    tiny[1] = 0
    assert quantize(tiny, "nvfp4").scales.float()[1].item() == 2.0**-9


def test_fp8_by_hand() -> None:
    w = torch.zeros(129, 130)
    w[0, 0], w[0, 128], w[128, 0] = 448.0, 896.0, -224.0
    q = quantize(w, "fp8_block")
    assert q.scales.tolist() == [[1, 2], [0.5, 1]]
    assert q.scales.dtype == torch.float32
    per_row = quantize(w, "fp8_ch").scales
    assert per_row.shape == (129, 1) and per_row[[0, 128, 1], 0].tolist() == [2, 0.5, 1]
    assert quantize(w, "fp8").global_scale.tolist() == [2]


@pytest.mark.parametrize("name", QUANTIZED)
def test_zero_weights(name: str) -> None:
    assert quantize(torch.zeros(3, 128), name).dequantize().abs().max() == 0


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_input_dtypes_are_their_float32_values(name: str, dtype: torch.dtype) -> None:
    w = weight(17, 128).to(dtype)
    assert quantize(w, name).identical(quantize(w.float(), name))


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
def test_experts_are_done_alone(name: str) -> None:
    w = weight(33, 128, 5, (2, 3)) * torch.rand(2, 3, 1, 1)
    q = quantize(w, name)
    assert q.shape == (2, 3, 33, 128)
    for expert, matrix in zip(q.experts(), w.view(6, 33, 128), strict=True):
        assert expert.identical(quantize(matrix, name))
    assert torch.equal(q.dequantize().view(6, 33, 128)[4], quantize(w[1, 1], name).dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_segments_are_done_alone(name: str) -> None:
    w = (
        weight(300, 128, 6)
        * torch.cat([torch.ones(130), torch.full((70,), 8.0), torch.full((100,), 0.1)])[:, None]
    )
    q = quantize(w, name, segments=(0, 130, 200))
    parts = [quantize(p, name).dequantize() for p in w.split([130, 70, 100])]
    assert torch.equal(q.dequantize(), torch.cat(parts))
    if q.scheme.has_global:
        assert q.segments == (0, 130, 200) and q.global_scale.unique().numel() == 3


@pytest.mark.parametrize("name", [n for n in QUANTIZED if "_g" in n])
def test_act_order_is_the_sorted_weight(name: str) -> None:
    w, g_idx = weight(20, 256, 7), act_order(name, 256)
    order = torch.argsort(g_idx, stable=True)
    q = quantize(w, name, g_idx=g_idx)
    assert torch.equal(q.dequantize()[:, order], quantize(w[:, order], name).dequantize())
    assert same_bits(q.scales, quantize(w[:, order], name).scales)


@pytest.mark.parametrize("name", QUANTIZED)
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(300, 128, 8)
    unchunked = quantize(w, name)
    monkeypatch.setattr(rtn, "_CHUNK", 7 * 128)
    monkeypatch.setattr("gristmill.quant.tensor._CHUNK", 11 * 128)
    assert quantize(w, name).identical(unchunked)
    assert torch.equal(quantize(w, name).dequantize(), torch.from_numpy(round_trip(w.numpy(), name)))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("zero_points", [False, True])
def test_every_integer_width(bits: int, zero_points: bool) -> None:
    scheme = QuantScheme.integer(bits, 32, zero_points=zero_points)
    w = weight(9, 96, bits)
    d = quantize(w, scheme).dequantize()
    step = torch.from_numpy(np.asarray(quantize(w, scheme).scales.float())).repeat_interleave(32, 1)
    # bf16 scales are at most 2**-8 too small, so the outermost code misses the end of the range by that much
    slack = step * (0.5 + 2.0**bits / 256 + (0.5 if bits == 1 else 0))
    assert bool(((d - w).abs() <= slack).all())


@pytest.mark.parametrize("name", [n for n in QUANTIZED if QuantScheme.parse(n).requires_k_multiple > 1])
def test_k_not_a_multiple(name: str) -> None:
    group = QuantScheme.parse(name).group_size
    with pytest.raises(
        ValueError, match=rf"{name} has groups of {group} along K, and K = {group + 1} .*not a multiple"
    ):
        quantize(torch.randn(4, group + 1), name)


def test_a_parameter_is_quantized_without_its_graph() -> None:
    weight = torch.nn.Parameter(torch.randn(16, 64))
    q = quantize(weight, "int4_g32")
    assert q.scales is not None
    assert not q.scales.requires_grad
    assert torch.equal(q.dequantize(), quantize(weight.detach(), "int4_g32").dequantize())
    assert not quantize(weight, "bf16").codes.requires_grad


def test_a_weight_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="meta device: load it first"):
        quantize(torch.empty(16, 64, device="meta"), "int4_g32")


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_named(name: str, value: float) -> None:
    w = torch.randn(2, 4, 128)
    w[1, 2, 77] = value
    with pytest.raises(ValueError, match=r"1 values that are NaN or infinite.*expert 1, \[2, 77\].*" + name):
        quantize(w, name)


def test_other_bad_input() -> None:
    with pytest.raises(TypeError, match="int32"):
        quantize(torch.zeros(2, 32, dtype=torch.int32), "mxfp4")
    with pytest.raises(ValueError, match=r"\[32\]"):
        quantize(torch.zeros(32), "mxfp4")
    with pytest.raises(ValueError, match=r"\[0, 32\]"):
        quantize(torch.zeros(0, 32), "mxfp4")
    with pytest.raises(ValueError, match="beyond the range of torch.float16"):
        quantize(torch.full((2, 2), 7e4), "fp16")
    with pytest.raises(ValueError, match="infinite in float32"):
        quantize(torch.full((2, 2), 1e300, dtype=torch.float64), "fp32")
    with pytest.raises(ValueError, match="not of mxfp4"):
        quantize(torch.zeros(2, 32), "mxfp4", g_idx=torch.zeros(32, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"g_idx has values 0..1 .* got 0..2"):
        quantize(torch.zeros(2, 64), "int4_g32", g_idx=torch.arange(64) // 24)
    with pytest.raises(ValueError, match="integer tensor"):
        quantize(torch.zeros(2, 64), "int4_g32", g_idx=torch.zeros(63, dtype=torch.int32))
    for bad in ((1,), (0, 0), (0, 8), ()):
        with pytest.raises(ValueError, match="segments"):
            quantize(torch.zeros(8, 64), "nvfp4", segments=bad)


def test_round_trip_of_representable_weights() -> None:
    """Values that a scheme can represent are kept: quantizing twice changes nothing."""
    for name in ("mxfp8", "fp8", "fp8_ch", "fp8_block", "nvfp4", "bf16"):
        once = quantize(weight(20, 128), name).dequantize()
        assert torch.allclose(quantize(once, name).dequantize(), once, rtol=3e-7, atol=0), name
    assert numeric.E4M3_MAX == 448


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads peak memory of Linux")
def test_peak_memory_of_a_large_expert_weight() -> None:
    code = (
        "import resource, torch\n"
        "from gristmill.quant import quantize\n"
        "quantize(torch.ones(2, 128, 256, dtype=torch.bfloat16), 'int4_g128')\n"
        "w = torch.ones(4, 2048, 4096, dtype=torch.bfloat16)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "quantize(w, 'int4_g128')\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    run = forked.run("-c", code)
    # a float32 copy of the weight alone would take 128 MB, and each temporary as much again
    assert run.returncode == 0 and int(run.stdout) < 230, run.stderr
