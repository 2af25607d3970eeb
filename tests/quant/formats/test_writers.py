"""What is written reads back bit for bit, and the compressed-tensors package reads the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.quant import quantize
from gristmill.quant.formats import FormatError, Tensors, checkpoint_formats, open_format, open_writer
from gristmill.quant.formats.writers import stored_name
from gristmill.quant.tensor import same_bits
from tests.quant.oracle import QUANTIZED, act_order, weight

NAME = "model.layers.0.mlp.down_proj"
ODD = (
    "int3_g64",
    "int2_g32_zp",
    "int5_ch",
    "int6_g32_zp",
    "int7_g128",
    "int8_g32",
    "int3_ch_zp",
    "int8_ch_zp",
)


def holds(form: str, scheme: str) -> bool:
    try:
        open_writer(form, scheme)
    except FormatError:
        return False
    return True


WRITERS = [name for name, spec in checkpoint_formats().items() if spec.write is not None]
ALL = [
    (f, s) for f in WRITERS for s in (*QUANTIZED, *ODD, "int8_ch.int8_token", "int4_g32_min") if holds(f, s)
]


@pytest.mark.parametrize(("form", "scheme"), ALL)
def test_what_is_written_reads_back(form: str, scheme: str) -> None:
    shape = (96, 256) if form == "gptq" else (77, 256)
    writer, values = open_writer(form, scheme), weight(*shape)
    if writer.stacked:
        shape, values = (3, *shape), torch.stack([weight(*shape, seed) for seed in range(3)])
    q = writer.quantize(values)
    stored = {stored_name(NAME, suffix): t for suffix, t in writer.tensors(q).items()}
    assert all(t.is_contiguous() for t in stored.values())
    read_back = open_format(writer.config([])).read(Tensors(stored), NAME, shape)
    assert read_back is not None and set(read_back.names) == set(stored)
    read = read_back.weight
    assert read.scheme == q.scheme.without_activation or form == "gristmill"
    assert torch.equal(read.dequantize(), q.dequantize())
    assert torch.equal(read.codes, q.codes) and (q.zero is None or torch.equal(read.zero, q.zero))
    rewritten = {stored_name(NAME, suffix): t for suffix, t in writer.tensors(read).items()}
    assert stored.keys() == rewritten.keys()
    for name, tensor in stored.items():
        assert (
            same_bits(tensor.reshape(-1), rewritten[name].reshape(-1))
            and tensor.shape == rewritten[name].shape
        ), name


def test_there_is_something_of_each() -> None:
    counts = {form: sum(f == form for f, _ in ALL) for form in WRITERS}
    assert counts == {
        "gristmill": 26,
        "compressed-tensors": 25,
        "modelopt": 4,
        "gptq": 15,
        "fp8": 1,
        "mxfp4": 1,
    }


@pytest.mark.parametrize("scheme", [s for f, s in ALL if f == "compressed-tensors"])
def test_compressed_tensors_reads_the_same_values(scheme: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    writer = open_writer("compressed-tensors", scheme)
    q = writer.quantize(weight(77, 256))
    config = QuantizationConfig(**writer.config([]))
    group = config.config_groups["group_0"]
    stored: dict[str, Any] = dict(writer.tensors(q))
    if stored["weight_scale"].dtype == torch.bfloat16:
        stored["weight_scale"] = stored["weight_scale"].float()
    values = BaseCompressor.get_value_from_registry(group.format).decompress(stored, group)["weight"].float()
    if scheme == "nvfp4":  # the package computes in bfloat16
        assert torch.allclose(values, q.dequantize(), rtol=2.0**-6, atol=0)
    else:
        assert torch.equal(values, q.dequantize())


def test_act_order_is_written() -> None:
    for form in ("gptq", "compressed-tensors"):
        writer = open_writer(form, "int4_g32_zp")
        q = quantize(weight(64, 256), "int4_g32_zp", g_idx=act_order("int4_g32", 256))
        stored = {f"{NAME}.{suffix}": t for suffix, t in writer.tensors(q).items()}
        read_back = open_format(writer.config([])).read(Tensors(stored), NAME, (64, 256))
        assert read_back is not None and torch.equal(read_back.weight.dequantize(), q.dequantize())
        assert read_back.weight.g_idx is not None and torch.equal(read_back.weight.g_idx, q.g_idx)


@pytest.mark.parametrize("seed", range(40))
def test_a_divisor_that_is_exact(seed: int) -> None:
    """NVFP4's global scale goes through 1 / x and back. Where that is not exact, the scale is adjusted first."""
    writer = open_writer("compressed-tensors", "nvfp4")
    w = weight(3, 32, seed) * (1 + seed / 41)
    q = writer.quantize(w)
    divisor = writer.tensors(q)["weight_global_scale"]
    assert torch.equal(1 / divisor, q.global_scale)
    plain = quantize(w, "nvfp4").global_scale
    assert torch.allclose(q.global_scale, plain, rtol=2.0**-22, atol=0)


def test_refusals() -> None:
    with pytest.raises(
        FormatError,
        match="no format 'exl2' to write; known: compressed-tensors, fp8, gptq, gristmill, modelopt, mxfp4",
    ):
        open_writer("exl2", "int4_g128")
    for form, scheme in (
        ("gptq", "nvfp4"),
        ("gptq", "int5_g32"),
        ("fp8", "fp8_ch"),
        ("modelopt", "int4_g128"),
        ("compressed-tensors", "int4_g32_min"),
        ("gristmill", "bf16"),
    ):
        with pytest.raises(FormatError, match=f"{form} checkpoints do not hold {scheme}"):
            open_writer(form, scheme)
    with pytest.raises(FormatError, match="whole int32 words"):
        open_writer("gptq", "int3_g32").tensors(quantize(weight(33, 64), "int3_g32"))
