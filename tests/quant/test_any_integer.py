"""Integer schemes of any width and group, with zero points or minimums: names, rounding, dequantization,
cuts, packing, products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import QuantTensor, concat, pack, quantize, unpack
from tests.quant.oracle import variants, weight

NAMES = [
    "int1_g32",
    "int2_g16_min",
    "int2_g64_zp",
    "int3_g16",
    "int3_g128_zp",
    "int3_ch",
    "int4_g16_min",
    "int4_g256",
    "int5_g32",
    "int5_g32_min",
    "int6_g16",
    "int6_ch_zp",
    "int7_g64",
    "int8_g32",
    "int8_ch_zp",
    "int8_g64_min",
    "int4_ch_min",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_parse_and_print_back(name: str) -> None:
    scheme = QuantScheme.parse(f"{name}.fp8_token")
    assert str(scheme) == f"{name}.fp8_token" and scheme.without_activation == QuantScheme.parse(name)
    assert not scheme.is_named and name not in ALL_WEIGHT_SCHEMES
    assert scheme.symmetric == (not name.endswith(("_zp", "_min")))


@pytest.mark.parametrize(
    "bad", ["int9_g32", "int0_ch", "int4_g0", "int4_g32_zp_min", "int4_g032", "int_ch", "int4_g12345678"]
)
def test_names_that_are_none(bad: str) -> None:
    with pytest.raises(ValueError, match="no weight format"):
        QuantScheme.parse(bad)
    with pytest.raises(ValueError, match="not both"):
        QuantScheme.integer(4, 32, zero_points=True, minimums=True)


def by_hand(q: QuantTensor) -> torch.Tensor:
    """Applies the definition once more, value by value, in Python floats rounded to float32."""
    codes, out = q.unpacked(), torch.empty(q.shape)
    for n in range(q.n):
        for k, g in enumerate(q.column_groups().tolist()):
            code, scale = codes[n, k].float(), q.scales[n, g].float()
            zero = torch.tensor(float(q.scheme.implicit_zero)) if q.zero is None else q.zero[n, g].float()
            out[n, k] = code * scale - zero if q.scheme.minimums else (code - zero) * scale
    return out


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_is_the_definition_and_rounding_is_near(name: str) -> None:
    w = weight(7, 256)
    q = quantize(w, name)
    assert torch.equal(q.dequantize(), by_hand(q))
    if q.scheme.bits > 1:
        bound = (q.scales.float() * (1.05 if q.scheme.minimums else 0.55)).repeat_interleave(
            256 // q.scales.shape[1], 1
        )
        reach = w.abs() * 2.0**-7 + w.abs().amax(1, keepdim=True) * 2.0**-8  # scales and offsets are bf16
        assert bool(((q.dequantize() - w).abs() <= bound + reach).all())


@pytest.mark.parametrize("name", NAMES)
def test_cuts_and_joins_are_exact(name: str) -> None:
    for q in variants(name):
        full = q.dequantize()
        for dim in (-2, -1):
            size = q.shape[dim]
            if size % 2 == 0 or size == 1:
                continue
            part = q.narrow(dim, size // 3, size // 2)
            assert torch.equal(part.dequantize(), full.narrow(dim, size // 3, size // 2))
        if q.n > 2:
            a, b = q.narrow(-2, 0, q.n // 2), q.narrow(-2, q.n // 2, q.n - q.n // 2)
            assert torch.equal(concat([a, b], -2).dequantize(), full)


@pytest.mark.parametrize("name", NAMES)
def test_plain_layout_round_trips(name: str) -> None:
    layout = default_registry().layout("plain_v1")
    for q in variants(name):
        packed = pack(q, layout)
        assert unpack(packed).identical(q)
        if q.g_idx is None and not q.lead:
            assert packed.nbytes == layout.nbytes(q.scheme, q.n, q.k)
    rows16: Layout = default_registry().layout("cpu_rows16_v1")
    assert name in (rows16.why_not(name) or "")


@pytest.mark.parametrize("name", ["int3_g128_zp", "int5_g32_min", "int6_g16", "int4_g256"])
def test_linear_multiplies_them(name: str, tmp_path: Path) -> None:
    from gristmill.kernel_registry.policy import Policy
    from gristmill.runtime.layers.linear import Linear
    from gristmill.runtime.layers.plans import Plans

    w = quantize(weight(33, 256), name)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ w.dequantize().double().T
    layer = Linear(Plans(torch.device("cpu"), torch.float32, Policy(cache=str(tmp_path))), w)
    assert torch.allclose(layer(x).double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "fp8_block", "int4_ch_min", "int3_g16"])
def test_rows_in_another_order(name: str) -> None:
    q = quantize(weight(300, 256), name)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:131]
    assert torch.equal(q.rows(order).dequantize(), q.dequantize()[order])
    with pytest.raises(ValueError, match=r"0\.\.299"):
        q.rows(torch.tensor([300]))


def test_rows_of_several_multipliers_are_refused() -> None:
    q = quantize(weight(64, 64), "nvfp4", segments=(0, 32))
    with pytest.raises(ValueError, match="several global multipliers"):
        q.rows(torch.arange(64))


def test_minimums_are_checked() -> None:
    q = quantize(weight(4, 64), "int4_g32_min")
    with pytest.raises(TypeError, match="float offsets"):
        QuantTensor(q.codes, q.scales, q.shape, q.scheme, q.zero.to(torch.uint8))
    with pytest.raises(ValueError, match="expected minimums"):
        QuantTensor(q.codes, q.scales, q.shape, q.scheme)
    # planted fault: read as zero points, the offsets mean something else
    wrong = QuantTensor(q.codes, q.scales, q.shape, "int4_g32_zp", q.zero)
    assert not torch.allclose(wrong.dequantize(), q.dequantize())
