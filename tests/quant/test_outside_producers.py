"""Codes and values compared with what other packages write: compressed-tensors and gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.quant import QuantTensor, numeric, quantize
from tests.quant.oracle import weight


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [32, 96, 50])
def test_bit_stream_is_that_of_pack_quantized(bits: int, k: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << (bits - 1)
    signed = torch.randint(
        -half, half, (5, k), dtype=torch.int8, generator=torch.Generator().manual_seed(bits)
    )
    words = helpers.pack_to_int32(signed, bits)
    packed = numeric.pack_bits((signed.to(torch.int16) + half).to(torch.uint8), bits)
    assert torch.equal(words.view(torch.uint8)[:, : packed.shape[1]], packed)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized_checkpoint_reads_as_it_is(bits: int, symmetric: bool) -> None:
    """The words [N, K * bits / 32] of a weight_packed are QuantTensor's codes; only zero points need an
    offset."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from gristmill.kernel_registry.scheme import QuantScheme

    generator = torch.Generator().manual_seed(bits)
    half = 1 << (bits - 1)
    signed = torch.randint(-half, half, (6, 128), dtype=torch.int8, generator=generator)
    scale = torch.rand(6, 2, generator=generator).to(torch.float16) + 0.01
    zero = torch.zeros(6, 2) if symmetric else torch.randint(-half, half, (6, 2), generator=generator).float()
    codes = helpers.pack_to_int32(signed, bits).view(torch.uint8)
    stored = None if symmetric else (zero + half).to(torch.uint8)
    scheme = QuantScheme.integer(bits, 64, zero_points=not symmetric)
    q = QuantTensor(codes, scale, (6, 128), scheme, stored)
    expected = (signed.float() - zero.repeat_interleave(64, 1)) * scale.float().repeat_interleave(64, 1)
    assert torch.equal(q.dequantize(), expected)


def test_nvfp4_codes_read_as_compressed_tensors_reads_them() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    q = quantize(weight(9, 64), "nvfp4")
    values = helpers.unpack_fp4_from_uint8(q.codes, 9, 64, torch.float32)
    assert torch.equal(
        helpers.pack_fp4_to_uint8(values)[values.view(-1, 2).ne(0).all(1).view(9, 32)],
        q.codes[values.view(-1, 2).ne(0).all(1).view(9, 32)],
    )
    # here the global scale is a divisor
    expected = values * q.scales.float().repeat_interleave(16, 1) / (1 / q.global_scale.double()).float()
    assert torch.allclose(q.dequantize(), expected, rtol=3e-7, atol=0)


def test_nvfp4_rounding_is_that_of_compressed_tensors() -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    q = quantize(w, "nvfp4")
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    )
    ratio = torch.tensor([1.0]) / q.global_scale
    expected = forward.fake_quantize(w, q.scales.float(), None, args, global_scale=ratio)
    # scale / (1 / global) and scale * global may differ in the last bit
    assert torch.allclose(q.dequantize(), expected, rtol=1e-6, atol=0)


def test_mxfp4_is_ggufs() -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    w = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)) * 3
    blocks = quants.quantize(w.numpy(), gguf.GGMLQuantizationType.MXFP4)
    expected = quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    q = quantize(w, "mxfp4")
    assert np.array_equal(q.dequantize().numpy(), expected)
    assert np.array_equal(q.scales.numpy(), blocks.reshape(8, -1, 17)[..., 0])


def test_q8_0_blocks_are_int8_groups() -> None:
    """gguf's Q8_0 (int8, one fp16 scale per 32) is an integer scheme here, value for value."""
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    from gristmill.kernel_registry.scheme import QuantScheme

    blocks = quants.quantize(weight(5, 128).numpy(), gguf.GGMLQuantizationType.Q8_0).reshape(5, 4, 34)
    scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0])
    codes = torch.from_numpy(blocks[..., 2:].reshape(5, 128) ^ 0x80)
    q = QuantTensor(codes, scales, (5, 128), QuantScheme.integer(8, 32))
    expected = quants.dequantize(blocks.reshape(5, -1), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(q.dequantize().numpy(), expected)
