"""FP8 in 128 x 128 blocks, compared with what transformers and compressed-tensors read from the same bytes;
also partial blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gristmill.quant import numeric, quantize
from gristmill.quant.formats import FormatError, Tensors
from gristmill.quant.formats.deepseek_fp8 import DeepSeekFp8
from tests.quant.oracle import weight

NAME = "model.layers.0.self_attn.q_proj"
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def stored(n: int, k: int, lead: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    q = quantize(weight(n, k, 0, lead), "fp8_block")
    codes = q.codes.view(torch.float8_e4m3fn)
    return {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": q.scales}


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_what_transformers_quantizes(scale_fmt: str) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
    op = SimpleNamespace(quantization_config=config)
    tensors = fp8.Fp8Quantize(op)._quantize_one(f"{NAME}.weight", weight(256, 384))
    values = fp8.Fp8Dequantize(op)._dequantize_one(*tensors.values(), output_dtype=torch.float32)
    read_back = DeepSeekFp8(CONFIG | {"scale_fmt": scale_fmt}).read(Tensors(tensors), NAME, (256, 384))
    assert (
        read_back is not None
        and str(read_back.weight.scheme) == "fp8_block"
        and read_back.activation == "fp8_g128"
    )
    assert torch.equal(read_back.weight.codes, tensors[f"{NAME}.weight"].view(torch.uint8))
    assert torch.equal(read_back.weight.dequantize(), values)
    assert tensors[f"{NAME}.weight_scale_inv"].dtype == (
        torch.float8_e8m0fnu if scale_fmt == "ue8m0" else torch.float32
    )


@pytest.mark.parametrize("shape", [(576, 7168 // 16), (130, 257), (64, 128), (1, 1)])
def test_partial_blocks_as_compressed_tensors_reads_them(shape: tuple[int, int]) -> None:
    """kv_a_proj_with_mqa has 576 rows: four and a half blocks."""
    module = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer")
    dequantizer = module.FP8BlockDequantizer(
        targets=[f"re:{NAME}"], weight_block_size=(128, 128), dtype=torch.float32
    )
    tensors = stored(*shape)
    values = dequantizer._create_dequantized_weight(
        tensors[f"{NAME}.weight"], tensors[f"{NAME}.weight_scale_inv"]
    )
    read_back = DeepSeekFp8(CONFIG).read(Tensors(tensors), NAME, shape)
    assert read_back is not None and torch.equal(read_back.weight.dequantize(), values)


def test_fused_experts_and_floats() -> None:
    tensors = stored(64, 200, (3,))
    read_back = DeepSeekFp8(CONFIG).read(Tensors(tensors), NAME, (3, 64, 200))
    assert read_back is not None and read_back.weight.identical(
        quantize(weight(64, 200, 0, (3,)), "fp8_block")
    )
    float_tensors = {f"{NAME}.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    assert DeepSeekFp8(CONFIG).read(Tensors(float_tensors), NAME, (4, 4)) is None


@pytest.mark.parametrize("static", [True, False])
def test_one_scale_a_tensor(static: bool) -> None:
    q = quantize(weight(20, 30), "fp8")
    tensors = {f"{NAME}.weight": q.codes.view(torch.float8_e4m3fn), f"{NAME}.weight_scale": q.global_scale[0]}
    config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if static:
        with pytest.raises(FormatError, match="input_scale"):
            DeepSeekFp8(config).read(Tensors(tensors), NAME, (20, 30))
        tensors[f"{NAME}.input_scale"] = torch.tensor(0.5)
    read_back = DeepSeekFp8(config).read(Tensors(tensors), NAME, (20, 30))
    assert read_back is not None and read_back.weight.identical(q) and set(read_back.names) == set(tensors)
    assert read_back.input_scale is None or float(read_back.input_scale) == 0.5


def test_refusals() -> None:
    for change, message in (
        ({"weight_block_size": [64, 64]}, r"\[64, 64\] is not read"),
        ({"fmt": "e5m2"}, "'e5m2'"),
        ({"activation_scheme": "weekly"}, "'weekly'"),
    ):
        with pytest.raises(FormatError, match=message):
            DeepSeekFp8(CONFIG | change)
    tensors = stored(130, 128)
    cases = [
        ({f"{NAME}.weight_scale_inv": torch.ones(1, 1)}, r"shape \[2, 1\], got \[1, 1\]"),
        (
            {f"{NAME}.weight": torch.zeros(130, 128, dtype=torch.float8_e5m2)},
            "float8_e4m3fnuz, got torch.float8_e5m2",
        ),
        ({f"{NAME}.weight_scale_inv": torch.tensor([[1.0], [torch.inf]])}, "finite"),
    ]
    broken = tensors[f"{NAME}.weight"].clone()
    broken.view(torch.uint8)[3, 5] = 0xFF
    cases.append(({f"{NAME}.weight": broken}, "fp8_block weights hold NaN"))
    for change, message in cases:
        with pytest.raises(FormatError, match=message):
            DeepSeekFp8(CONFIG).read(Tensors(tensors | change), NAME, (130, 128))
    with pytest.raises(FormatError, match="listed as not converted"):
        DeepSeekFp8(CONFIG | {"modules_to_not_convert": ["self_attn.q_proj"]}).read(
            Tensors(tensors), NAME, (130, 128)
        )
    del tensors[f"{NAME}.weight_scale_inv"]
    with pytest.raises(FormatError, match="weight_scale_inv; found .*weight"):
        DeepSeekFp8(CONFIG).read(Tensors(tensors), NAME, (130, 128))


def test_a_wrong_block_shows() -> None:
    """Planted fault: the scales of two block rows are swapped."""
    tensors = stored(300, 128)
    right = DeepSeekFp8(CONFIG).read(Tensors(tensors), NAME, (300, 128))
    tensors[f"{NAME}.weight_scale_inv"] = tensors[f"{NAME}.weight_scale_inv"][[1, 0, 2]]
    wrong = DeepSeekFp8(CONFIG).read(Tensors(tensors), NAME, (300, 128))
    assert right is not None and wrong is not None
    same = (right.weight.dequantize() == wrong.weight.dequantize()).all(1)
    assert bool(same[256:].all()) and not bool(same[:256].all())


def test_every_fnuz_code_there_and_back() -> None:
    """Compares all 256 bytes with torch's own float8_e4m3fnuz."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = every[(every & 0x7F) != 0x7F]
    fnuz = numeric.e4m3fn_to_fnuz(finite).view(torch.float8_e4m3fnuz).float()
    assert torch.equal(2 * fnuz, numeric.e4m3_decode(finite))
    back = finite[finite != 0x80]
    assert torch.equal(
        numeric.e4m3_decode(numeric.e4m3fnuz_to_fn(back)), 2 * back.view(torch.float8_e4m3fnuz).float()
    )
    for bad in (0x7F, 0xFF, 0x80):
        with pytest.raises(ValueError, match="no E4M3 code of twice"):
            numeric.e4m3fnuz_to_fn(torch.tensor([bad], dtype=torch.uint8))


@pytest.mark.parametrize("blocks", [True, False])
def test_weights_in_fnuz(blocks: bool) -> None:
    values = (weight(130, 128) / 100).clamp(-200, 200).to(torch.float8_e4m3fnuz)
    values.view(torch.uint8)[values.view(torch.uint8) == 0x80] = 0
    scales = torch.rand(2, 1) + 0.5 if blocks else torch.tensor(0.75)
    tensors = {f"{NAME}.weight": values, f"{NAME}.weight_scale{'_inv' if blocks else ''}": scales}
    read_back = DeepSeekFp8(CONFIG if blocks else {"quant_method": "fp8"}).read(
        Tensors(tensors), NAME, (130, 128)
    )
    spread = scales.repeat_interleave(128, 0)[:130] if blocks else scales
    assert read_back is not None and torch.equal(read_back.weight.dequantize(), values.float() * spread)
    values.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(FormatError, match="0x7F, 0xFF"):
        DeepSeekFp8(CONFIG if blocks else {"quant_method": "fp8"}).read(Tensors(tensors), NAME, (130, 128))
