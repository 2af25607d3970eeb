"""QuantTensor: the meaning of its fields by hand, and an error that names each field that contradicts them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import QuantTensor, quantize
from gristmill.quant.tensor import same_bits
from tests.quant.oracle import act_order, weight


def test_order_of_operations_is_code_minus_zero_times_scale_times_global() -> None:
    codes = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]], dtype=torch.uint8)
    scale, top = torch.tensor([[0.0703125]]).to(torch.float8_e4m3fn), torch.tensor([1 / 3])
    q = QuantTensor(codes, scale, (1, 16), "nvfp4", global_scale=top)  # type: ignore[arg-type]
    values = [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    expected = (torch.tensor([values]) * scale.float()) * top
    assert torch.equal(q.dequantize(), expected)
    assert q.scheme == QuantScheme.parse("nvfp4")


def test_zero_points_integer_and_float() -> None:
    codes = torch.tensor([[0x10, 0xF2]], dtype=torch.uint8).repeat(1, 8)
    scheme = QuantScheme.parse("int4_g32_zp")
    scales = torch.tensor([[0.5]], dtype=torch.float16)
    integer = QuantTensor(codes, scales, (1, 32), scheme, torch.tensor([[16]], dtype=torch.uint8))
    assert integer.dequantize()[0, :4].tolist() == [-8, -7.5, -7, -0.5]  # GPTQ files have a zero of 2**bits
    offset = QuantTensor(codes, scales, (1, 32), scheme, torch.tensor([[2.5]]))
    assert offset.dequantize()[0, :4].tolist() == [-1.25, -0.75, -0.25, 6.25]


def test_symmetric_integers_are_offset_binary() -> None:
    for bits in range(1, 9):
        codes = torch.zeros(1, bits, dtype=torch.uint8)
        q = QuantTensor(codes, torch.ones(1, 1), (1, 8), QuantScheme.integer(bits, 8))
        assert q.dequantize().unique().tolist() == [-(2.0 ** (bits - 1))]


def test_g_idx_names_the_scale_of_each_column() -> None:
    q = quantize(weight(3, 128), "int4_g32")
    g_idx = act_order("int4_g32", 128)
    other = dataclasses.replace(q, g_idx=g_idx)
    scale = q.scales.float()[:, g_idx.long()]
    assert torch.equal(other.dequantize(), (q.unpacked().float() - 8) * scale)
    regular = dataclasses.replace(q, g_idx=(torch.arange(128) // 32).int())
    assert regular.g_idx is None and regular.identical(q)


def test_n_idx_names_the_scale_row() -> None:
    q = quantize(weight(150, 128), "fp8_block")
    n_idx = torch.tensor([1] * 75 + [0] * 75, dtype=torch.int32)
    other = dataclasses.replace(q, n_idx=n_idx)
    values = dataclasses.replace(q, scales=torch.ones_like(q.scales)).dequantize()
    assert torch.equal(other.dequantize(), values * q.scales[n_idx.long()])


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
def test_dequantize_rounds_once(name: str) -> None:
    q = quantize(weight(20, 128), name)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(q.dequantize(dtype), q.dequantize().to(dtype))
    assert q.dequantize().shape == (20, 128) and q.dequantize().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_is_the_tensor_itself(dtype: torch.dtype) -> None:
    w = weight(5, 7).to(dtype)
    q = QuantTensor.from_dense(w)
    assert same_bits(q.dense(), w) and q.dense().data_ptr() == w.data_ptr()
    assert same_bits(q.narrow(1, 1, 3).dense(), w[:, 1:4])
    transposed = QuantTensor.from_dense(w.t())
    assert same_bits(transposed.dense(), w.t().contiguous())
    with pytest.raises(TypeError, match="float64"):
        QuantTensor.from_dense(w.double())
    with pytest.raises(ValueError, match="use dequantize"):
        quantize(w.float(), "fp8").dense()


def test_to_and_identical() -> None:
    q = quantize(weight(20, 128), "nvfp4")
    assert q.to("cpu").identical(q)
    assert q.to("meta").device.type == "meta"
    assert not q.identical(quantize(weight(20, 128, 1), "nvfp4"))
    assert not q.identical(quantize(weight(20, 128), "mxfp4"))
    assert not q.identical(dataclasses.replace(q, global_scale=q.global_scale * 2))
    assert "nvfp4 [20, 128] on cpu" in repr(q)


FAULTS = [
    ("int4_g32", "codes", lambda q: {"codes": q.codes.int()}, "expected uint8, got torch.int32"),
    ("int4_g32", "codes", lambda q: {"codes": q.codes[:, :-1]}, r"expected shape \[20, 64\], got \[20, 63\]"),
    ("int4_g32", "scales", lambda q: {"scales": None}, "expected a tensor"),
    ("int4_g32", "scales", lambda q: {"scales": q.scales[:, :3]}, r"expected shape \[20, 4\], got \[20, 3\]"),
    ("int4_g32", "scales", lambda q: {"scales": q.scales.double()}, "got torch.float64"),
    ("int4_g32", "scales", lambda q: {"scales": q.scales * float("nan")}, "finite"),
    ("int4_g32", "scales", lambda q: {"scales": q.scales.to("meta")}, "device cpu as the codes"),
    ("int4_g32", "zero", lambda q: {"zero": torch.zeros(20, 4, dtype=torch.uint8)}, "symmetric"),
    ("int4_g32", "global_scale", lambda q: {"global_scale": torch.ones(1)}, "expected none"),
    ("int4_g32_zp", "zero", lambda q: {"zero": None}, "expected zero points"),
    ("int4_g32_zp", "zero", lambda q: {"zero": q.zero + 17}, r"integer codes 0..16"),
    ("int4_g32_zp", "zero", lambda q: {"zero": q.zero.int()}, "uint8 codes or float offsets"),
    ("int4_g32_zp", "zero", lambda q: {"zero": q.zero[:1]}, "of the scales"),
    ("int4_g32", "g_idx", lambda q: {"g_idx": torch.zeros(128)}, "expected int32"),
    ("int4_g32", "g_idx", lambda q: {"g_idx": torch.zeros(127, dtype=torch.int32)}, r"shape \[128\]"),
    ("int4_g32", "g_idx", lambda q: {"g_idx": torch.full((128,), 4, dtype=torch.int32)}, "values 0..3"),
    ("int4_g32", "g_idx", lambda q: {"g_idx": torch.full((128,), -1, dtype=torch.int32)}, "values 0..3"),
    (
        "int4_ch",
        "g_idx",
        lambda q: {"g_idx": torch.zeros(128, dtype=torch.int32)},
        "channel scales have no such",
    ),
    (
        "int4_g32",
        "n_idx",
        lambda q: {"n_idx": torch.zeros(20, dtype=torch.int32)},
        "group scales have no such",
    ),
    ("fp8_block", "n_idx", lambda q: {"n_idx": torch.ones(20, dtype=torch.int32)}, "values 0..0"),
    ("mxfp4", "scales", lambda q: {"scales": q.scales.float()}, "expected torch.uint8"),
    ("mxfp4", "scales", lambda q: {"scales": torch.full_like(q.scales, 255)}, "finite"),
    ("nvfp4", "scales", lambda q: {"scales": q.scales.view(torch.uint8)}, "expected torch.float8_e4m3fn"),
    ("nvfp4", "global_scale", lambda q: {"global_scale": None}, "float32 multipliers"),
    ("nvfp4", "global_scale", lambda q: {"global_scale": torch.ones(2)}, r"shape \[1\]"),
    ("nvfp4", "global_scale", lambda q: {"global_scale": torch.ones(1).half()}, "float32"),
    ("nvfp4", "global_scale", lambda q: {"global_scale": torch.tensor([float("inf")])}, "finite"),
    ("nvfp4", "segments", lambda q: {"segments": (0, 20)}, "increasing first rows below 20"),
    ("nvfp4", "segments", lambda q: {"segments": (1,)}, "starting with 0"),
    ("nvfp4", "segments", lambda q: {"segments": (0, 5, 5)}, "increasing"),
    ("fp8", "scales", lambda q: {"scales": torch.ones(20, 1)}, "expected none"),
    ("bf16", "scales", lambda q: {"scales": torch.ones(20, 1)}, "expected none"),
]


@pytest.mark.parametrize("name, field, change, message", FAULTS)
def test_contradictions_are_named(name: str, field: str, change, message: str) -> None:
    q = quantize(weight(20, 128), name)
    with pytest.raises(
        (ValueError, TypeError), match=rf"QuantTensor\({name} \[20, 128\]\)\.{field}: .*{message}"
    ):
        dataclasses.replace(q, **change(q))


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(8,\)"):
        QuantTensor(torch.zeros(8, dtype=torch.uint8), None, (8,), "fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown scheme 'fp7'"):
        QuantTensor(torch.zeros(8, 8, dtype=torch.uint8), None, (8, 8), "fp7")  # type: ignore[arg-type]
