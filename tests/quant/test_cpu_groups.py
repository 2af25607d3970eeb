"""cpu_groups16_v1: packing and its inverse, scales as integers times a factor, and what the layout does not hold."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels._packed_rows import dequantize_rows
from gristmill.quant import QuantTensor, pack, quantize, unpack
from gristmill.quant.layouts import _cpu_groups16
from gristmill.quant.packed import LayoutError

LAYOUT = default_registry().layout("cpu_groups16_v1")
SCHEMES = ("int4_g32_min", "int5_g32", "int5_g32_min", "int6_g16", "int8_g32", "int4_g256", "int8_g16_min")


def products(n: int, k: int, group: int, signed: bool) -> torch.Tensor:
    """Scales of a K-quant: a float16 per 256 columns times small integers."""
    generator = torch.Generator().manual_seed(n)
    d = (torch.rand(n, k // 256, generator=generator) * 0.01).half().float()
    s = torch.randint(
        -128 if signed else 0, 128 if signed else 64, (n, k // 256, 256 // group), generator=generator
    )
    if signed:  # as the quantizer of Q6_K leaves them
        d[::2] *= -1
        s[..., 0] = -128
    return (d[..., None] * s).flatten(-2)


def as_k_quant(q: QuantTensor) -> QuantTensor:
    n, k = q.shape
    group = q.scheme.group_size or 1
    scales = products(n, k, group, not q.scheme.minimums)
    zero = None if q.zero is None else products(n, k, group, False)
    return QuantTensor(q.codes, scales, q.shape, q.scheme, zero)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (16, 512), (40, 768)])
@pytest.mark.parametrize("factored", [False, True])
def test_unpack_is_the_inverse(name: str, n: int, k: int, factored: bool) -> None:
    q = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), name)
    q = as_k_quant(q) if factored else q
    packed = pack(q, LAYOUT)
    assert (packed.slots["scales"].dtype == torch.int8) is factored
    assert (
        packed.nbytes
        <= LAYOUT.nbytes(name, n, k) + 64 * factored * packed.slots["factors"].shape[0] * k // 256
    )
    back = unpack(packed)
    assert torch.equal(back.codes, q.codes) and back.scheme == q.scheme
    assert back.scales is not None and torch.equal(back.scales, q.scales)  # type: ignore[arg-type]
    assert (back.zero is None and q.zero is None) or torch.equal(back.zero, q.zero)  # type: ignore[arg-type]
    index = torch.tensor([0, n - 1, n // 2])
    rows = LAYOUT.load_rows()
    assert rows is not None
    torch.testing.assert_close(rows(packed, index), q.dequantize()[index], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        dequantize_rows(packed.tensors, q.scheme, k, 0, n), q.dequantize(), rtol=1e-6, atol=1e-7
    )


def test_torch_finds_the_factors_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    q = as_k_quant(quantize(torch.randn(24, 768), "int6_g16"))
    native = pack(q, LAYOUT).slots
    monkeypatch.setattr(_cpu_groups16, "packing_function", lambda *_: None)
    assert all(torch.equal(native[name], slot) for name, slot in pack(q, LAYOUT).slots.items())


@pytest.mark.parametrize("other", [0.3, 2.0**-25, 1e30])
def test_scales_that_are_no_products_stay_floats(other: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q = as_k_quant(quantize(torch.randn(16, 512), "int4_g32_min"))
    assert q.scales is not None
    q.scales[7, 3] = other
    for _ in range(2):
        packed = pack(q, LAYOUT)
        assert packed.slots["scales"].dtype == torch.float32 and packed.slots["offsets"].dtype == torch.int8
        assert torch.equal(unpack(packed).scales, q.scales)  # type: ignore[arg-type]
        monkeypatch.setattr(_cpu_groups16, "packing_function", lambda *_: None)


def test_what_it_does_not_hold_is_named() -> None:
    assert all(LAYOUT.accepts(name) for name in SCHEMES)
    for name in ("int4_g32_zp", "int3_g16", "int2_g16_min", "int5_g16", "int4_ch", "mxfp4", "bf16"):
        assert "some integer groups" in str(LAYOUT.why_not(name))
    experts = quantize(torch.randn(2, 16, 64), "int8_g32")
    with pytest.raises(LayoutError, match="one matrix"):
        pack(experts, LAYOUT)
    assert str(QuantScheme.parse("int6_g16").with_int8_activation()) == "int6_g16.int8_g32"
