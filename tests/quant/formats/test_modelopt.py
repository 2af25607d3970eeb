"""ModelOpt: hand-written bytes for every algorithm, and compressed-tensors' converter for NVFP4."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.quant import numeric, quantize
from gristmill.quant.formats import FormatError, Tensors
from gristmill.quant.formats.kv_scales import kv_scale, kv_scale_names
from gristmill.quant.formats.modelopt import ModelOpt
from tests.quant.oracle import weight

NAME = "model.layers.2.mlp.down_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def read(tensors: dict[str, torch.Tensor], algorithm: str, shape: tuple[int, ...], **more: Any) -> Any:
    read_back = ModelOpt({"quant_method": "modelopt", "quant_algo": algorithm, **more}).read(
        Tensors(tensors), NAME, shape
    )
    assert read_back is not None and set(read_back.names) == set(tensors)
    return read_back


def nvfp4() -> dict[str, torch.Tensor]:
    """Bytes 0x10, 0x32 ... 0xFE: every code once, low nibble first; scales 1 and 2, the multiplier 1/4."""
    return {
        f"{NAME}.weight": torch.tensor([[0x10 + 0x22 * i for i in range(8)] * 2], dtype=torch.uint8),
        f"{NAME}.weight_scale": torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn),
        f"{NAME}.weight_scale_2": torch.tensor(0.25),
        f"{NAME}.input_scale": torch.tensor(0.5),
    }


@pytest.mark.parametrize("algorithm", ["NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"])
def test_nvfp4_scale_2_is_a_multiplier(algorithm: str) -> None:
    read_back = read(nvfp4(), algorithm, (1, 32), group_size=16)
    assert read_back.weight.dequantize().tolist() == [torch.cat([E2M1 * 0.25, E2M1 * 0.5]).tolist()]
    assert float(read_back.input_scale) == 0.5
    assert read_back.activation == (None if algorithm == "W4A16_NVFP4" else "nvfp4")
    assert read_back.pre_scale is None
    scaled = nvfp4() | {f"{NAME}.pre_quant_scale": torch.arange(32, dtype=torch.bfloat16)}
    assert read(scaled, algorithm, (1, 32)).pre_scale.tolist() == list(range(32))


def test_nvfp4_is_what_compressed_tensors_converts() -> None:
    module = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4")
    from gristmill.quant.formats.compressed_tensors import CompressedTensors

    q = quantize(weight(24, 64), "nvfp4")
    tensors = {
        f"{NAME}.weight": q.codes,
        f"{NAME}.weight_scale": q.scales,
        f"{NAME}.weight_scale_2": q.global_scale[0],
        f"{NAME}.input_scale": torch.tensor(0.125),
    }
    converter = module.ModelOptNvfp4Converter(targets=["re:.*down_proj"], ignore=[])
    converted = converter.process(dict(tensors))
    config = converter.update_config(None).model_dump(mode="json")
    converted_layer = CompressedTensors(config).read(Tensors(converted), NAME, (24, 64))
    layer = read(tensors, "NVFP4", (24, 64))
    assert converted_layer is not None and layer.weight.identical(q)
    assert torch.equal(converted_layer.weight.codes, q.codes)
    # 1 / (1 / x) does not always equal x
    assert torch.allclose(converted_layer.weight.dequantize(), q.dequantize(), rtol=2.4e-7, atol=0)
    assert float(converted_layer.input_scale) == float(layer.input_scale) == 0.125


def test_mxfp4_keeps_its_minus_zero() -> None:
    """Exact zeros are stored as code 8, -0: the same value, another byte."""
    tensors = {
        f"{NAME}.weight": torch.tensor([[0x88] * 15 + [0x7F]], dtype=torch.uint8),
        f"{NAME}.weight_scale": torch.tensor([[129]], dtype=torch.uint8),
    }
    read_back = read(tensors, "MXFP4", (1, 32))
    assert read_back.weight.dequantize()[0].tolist() == [0.0] * 30 + [-24.0, 24.0]
    assert torch.equal(read_back.weight.codes, tensors[f"{NAME}.weight"])
    assert read(tensors, "W4A8_MXFP4_FP8", (1, 32)).activation == "fp8"


def test_mxfp8() -> None:
    tensors = {
        f"{NAME}.weight": torch.arange(32, dtype=torch.float32)[None].to(torch.float8_e4m3fn),
        f"{NAME}.weight_scale": torch.tensor([[126]], dtype=torch.uint8),
    }
    rounded = torch.arange(32.0).to(torch.float8_e4m3fn).float()
    assert torch.equal(read(tensors, "MXFP8", (1, 32)).weight.dequantize()[0], rounded / 2)


def test_fp8_of_three_granularities() -> None:
    codes = torch.full((256, 128), 2.0).to(torch.float8_e4m3fn)
    one = {
        f"{NAME}.weight": codes,
        f"{NAME}.weight_scale": torch.tensor(0.5),
        f"{NAME}.input_scale": torch.tensor(3.0),
    }
    read_back = read(one, "FP8", (256, 128))
    assert (
        bool((read_back.weight.dequantize() == 1).all())
        and float(read_back.input_scale) == 3
        and read_back.activation == "fp8"
    )
    row = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": torch.arange(256.0) + 1}
    assert read(row, "FP8_PER_CHANNEL_PER_TOKEN", (256, 128)).weight.dequantize()[:, 5].tolist() == [
        2.0 * i for i in range(1, 257)
    ]
    block = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": torch.tensor([1.0, 4.0]).view(2, 1, 1, 1)}
    read_back = read(block, "FP8_PB_WO", (256, 128)).weight
    assert read_back.dequantize()[::128, 0].tolist() == [2.0, 8.0] and str(read_back.scheme) == "fp8_block"
    with pytest.raises(FormatError, match=r"multiples of 128, got \[200, 128\]"):
        read({**block, f"{NAME}.weight": codes[:200]}, "FP8_PB_WO", (200, 128))


def test_which_modules() -> None:
    plain = ModelOpt(
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["lm_head", "model.layers.1.*", "*gate", "model.layers.3.self_attn"],
            }
        }
    )
    assert plain.rule("model.layers.0.mlp.up_proj") == "NVFP4"
    for module in (
        "lm_head",
        "model.layers.1.mlp.up_proj",
        "model.layers.0.mlp.gate",
        "model.layers.3.self_attn.q_proj",
    ):
        assert plain.rule(module) is None
    assert plain.rule("model.layers.10.mlp.up_proj") == "NVFP4"
    mixed = ModelOpt(
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
                NAME: {"quant_algo": "NVFP4", "group_size": 16},
            },
        }
    )
    assert (
        mixed.rule("model.layers.0.mlp.up_proj") == "FP8"
        and mixed.rule("model.layers.0.mlp.down_proj") is None
    )
    assert mixed.read(Tensors(nvfp4()), NAME, (1, 32)) is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_algo": "NVFP4_SVD"}, "NVFP4_SVD is not read; known: NVFP4"),
        ({"quant_algo": "W4A16_AWQ"}, "W4A16_AWQ is not read"),
        ({"quant_algo": "NVFP4", "group_size": 128}, None),
        ({"quant_algo": "NVFP4", "group_size": 32}, "'group_size' must be one of"),
        ({"quant_algo": "MIXED_PRECISION"}, "'quantized_layers' is missing"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT3"}}},
            "INT3 is not read",
        ),
        ({}, "'quant_algo' is missing"),
    ],
)
def test_refusals(config: dict[str, Any], message: str | None) -> None:
    if message is None:
        ModelOpt(config)
        return
    with pytest.raises(FormatError, match=message):
        ModelOpt(config)


def test_tensors_that_do_not_fit() -> None:
    cases = [
        ("weight_scale_2", None, "needs tensor .*weight_scale_2"),
        ("weight_scale_2", torch.tensor(torch.inf), "finite and positive, got inf"),
        ("weight_scale_2", torch.ones(3), r"one number, got shape \[3\]"),
        ("weight_scale", torch.ones(1, 2), "float8_e4m3fn, got torch.float32"),
        ("weight_scale", torch.ones(1, 1).to(torch.float8_e4m3fn), r"shape \[1, 2\], got \[1, 1\]"),
        ("weight", torch.zeros(1, 32, dtype=torch.uint8), r"shape \[1, 16\], got \[1, 32\]"),
    ]
    for part, value, message in cases:
        changed = {k: v for k, v in nvfp4().items() if k != f"{NAME}.{part}"}
        with pytest.raises(FormatError, match=message):
            read(changed | ({} if value is None else {f"{NAME}.{part}": value}), "NVFP4", (1, 32))


def test_kv_scales_of_every_naming() -> None:
    one = torch.tensor(0.5)
    names = {
        "a.k_proj.k_scale": ("a", "k"),
        "a.v_proj.v_scale": ("a", "v"),
        "b.k_scale": ("b", "k"),
        "b.v_scale": ("b", "v"),
        "c.attn.k_scale": ("c", "k"),
        "c.attn.v_scale": ("c", "v"),
        "d.k_proj.output_scale": ("d", "k"),
        "d.v_proj.output_scale": ("d", "v"),
    }
    tensors = Tensors(dict.fromkeys([*names, "e.kv_scale", "f.q_proj.output_scale", "g.weight_scale"], one))
    assert set(kv_scale_names(tensors)) == {*names.values(), ("e", "k"), ("e", "v")}
    with pytest.raises(FormatError, match="are both the k scale of a"):
        kv_scale_names(Tensors({"a.k_proj.k_scale": one, "a.k_scale": one}))


def test_kv_scales_of_tensors_and_heads() -> None:
    heads = torch.tensor([0.5, 2.0, 4.0])
    stored = Tensors(
        {"t": torch.tensor(0.5), "h": heads.bfloat16()[None, :, None], "w": heads[:2], "z": heads - 2}
    )
    assert kv_scale(stored, "t", 3).tolist() == [0.5] and kv_scale(stored, "h", 3).tolist() == heads.tolist()
    for name, message in (
        ("w", r"one per KV head \(3\), got shape \[2\]"),
        ("z", "finite and positive, got"),
    ):
        with pytest.raises(FormatError, match=f"tensor {name} must be .*{message}"):
            kv_scale(stored, name, 3)


@pytest.mark.parametrize(("stored", "form"), [("FP8", "fp8"), ("NVFP4", "nvfp4"), (None, None)])
def test_the_format_of_the_kv_cache(stored: str | None, form: str | None) -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": stored}
    assert ModelOpt({"quantization": inner}).kv_cache == form


def test_decoders_are_checked_by_the_table() -> None:
    assert torch.equal(numeric.e2m1_decode(torch.arange(16, dtype=torch.uint8)), E2M1)
