"""GGUF blocks and files compared with the gguf package: every type, value for value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.quant.formats import FormatError, Tensors
from gristmill.quant.formats.gguf import Gguf, GgufFile
from gristmill.quant.formats.gguf_blocks import TYPES, read_blocks
from gristmill.runtime.loader.config import gguf_architectures
from tests.quant.oracle import weight

gguf = pytest.importorskip("gguf")


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Returns random bytes with finite float16 scales, so that every bit of the layout matters."""
    size, generator = TYPES[kind].size, np.random.default_rng(len(kind))
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    halves = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
    }.get(kind, (0,))
    if kind == "MXFP4":
        data[..., 0] = generator.integers(0, 254, data.shape[:2])
        return data.reshape(rows, -1)
    for at in halves:
        values = generator.standard_normal((rows, blocks)).astype(np.float16)
        data[..., at : at + 2] = values[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", TYPES)
def test_random_blocks_have_the_packages_values(kind: str) -> None:
    data = random_blocks(kind, 5, 3)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    q = read_blocks("w", kind, torch.from_numpy(data), expected.shape)
    assert str(q.scheme) == TYPES[kind].scheme
    assert np.array_equal(q.dequantize().numpy(), expected)
    block = TYPES[kind].values  # cut along both dimensions, as for tensor-parallel ranks
    assert np.array_equal(q.narrow(1, block, block).dequantize().numpy(), expected[:, block : 2 * block])
    assert np.array_equal(q.narrow(1, 10, 80).dequantize().numpy(), expected[:, 10:90])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_what_the_package_quantizes(kind: str) -> None:
    data = gguf.quants.quantize(weight(6, 256).numpy(), gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(
        read_blocks("w", kind, torch.from_numpy(data), (6, 256)).dequantize().numpy(), expected
    )


def test_a_scale_of_zero_with_a_minimum() -> None:
    """Why offsets are stored instead of zero points: offset / 0 has no value."""
    data = np.zeros((1, 144), dtype=np.uint8)
    data[0, 2:4] = np.array([0.5], dtype=np.float16).view(np.uint8)
    data[0, 8:12] = 3
    values = read_blocks("w", "Q4_K", torch.from_numpy(data), (1, 256)).dequantize()
    assert values[0, :128].tolist() == [-1.5] * 128 and values[0, 128:].tolist() == [0.0] * 128


def test_blocks_that_do_not_fit() -> None:
    data = torch.zeros(2, 144, dtype=torch.uint8)
    for kind, shape, message in (
        ("IQ2_XS", (2, 256), "ggml type IQ2_XS is not read; known: F32"),
        ("Q4_K", (2, 200), "blocks of 256 along K, and K is 200"),
        ("Q4_K", (2, 512), r"rows of 288 bytes, got \[2, 144\]"),
        ("Q4_K", (3, 256), r"got \[2, 144\]"),
    ):
        with pytest.raises(FormatError, match=message):
            read_blocks("w", kind, data, shape)


def opened(path: Path) -> GgufFile:
    """Opens a file with the architectures that the model families declare."""
    return GgufFile(path, gguf_architectures())


def write(
    path: Path, kind: str | None = "Q8_0", architecture: str = "llama", **more: Any
) -> dict[str, torch.Tensor]:
    """Writes a file as llama.cpp's converter does: 4 heads of 8, 2 of them for k and v. Returns Hugging
    Face's tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    for name, value in more.items():
        writer.add_uint32(name.replace("__", "."), value)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (50, 32),
        "model.norm.weight": (32,),
        layer + "input_layernorm.weight": (32,),
        layer + "self_attn.q_proj.weight": (32, 32),
        layer + "self_attn.k_proj.weight": (16, 32),
        layer + "self_attn.v_proj.weight": (16, 32),
        layer + "self_attn.o_proj.weight": (32, 32),
        layer + "mlp.gate_proj.weight": (64, 32),
        layer + "mlp.up_proj.weight": (64, 32),
        layer + "mlp.down_proj.weight": (32, 64),
        layer + "post_attention_layernorm.weight": (32,),
    }
    table = gguf.get_tensor_name_map({n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}[architecture], 1)
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, (name, shape) in enumerate(shapes.items())
    }
    for name, tensor in tensors.items():
        data = tensor.numpy()
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads and architecture == "llama":  # the permutation of convert_hf_to_gguf
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
        gguf_name = f"{table.get_name(name.removesuffix('.weight'))}.weight"
        if data.ndim == 2 and kind is not None:
            raw = gguf.GGMLQuantizationType[kind]
            blocks = gguf.quants.quantize(data, raw)
            values = gguf.quants.dequantize(blocks, raw)
            if heads and architecture == "llama":
                values = (
                    values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
                    .swapaxes(1, 2)
                    .reshape(values.shape)
                )
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
            writer.add_tensor(gguf_name, blocks, raw_dtype=raw)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("kind", [None, "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_gives_hugging_faces_tensors(kind: str | None, architecture: str, tmp_path: Path) -> None:
    tensors = write(tmp_path / "m.gguf", kind, architecture)
    file = opened(tmp_path / "m.gguf")
    assert set(file) == set(tensors) and file.architecture.name == architecture
    for name, tensor in tensors.items():
        read_back = Gguf().read(file, name.removesuffix(".weight"), tuple(tensor.shape))
        if read_back is not None:
            assert read_back.names == (name,) and torch.equal(read_back.weight.dequantize(), tensor)
        else:
            assert torch.equal(file.read(name, tuple(tensor.shape)).float(), tensor)
    assert Gguf().read(file, "model.layers.0.mlp.gate", (1, 1)) is None


def test_files_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    data = path.read_bytes()
    for bad, message in (
        (b"", "is not a GGUF file: it begins with b''"),
        (b"PK\3\4" + data[4:], "not a GGUF file"),
        (data[:4] + b"\0\0\0\3" + data[8:], "version .* is not read"),
        (data[:100], "truncated or corrupt"),
        (data[:-100], "truncated or corrupt"),
        (data[:200], "truncated or corrupt"),
    ):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=message):
            opened(path)
    with pytest.raises(FormatError, match="cannot read"):
        opened(tmp_path / "none.gguf")
    write(path, split__count=3)
    with pytest.raises(FormatError, match="several parts"):
        opened(path)


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        FormatError, match="known: .*llama, llama with experts, .*qwen2, qwen2moe with experts, qwen3, .*"
    ):
        opened(path)
    write(path)
    file = opened(path)
    with pytest.raises(
        FormatError, match=r"blk\.0\.attn_k\.weight must have shape \[32, 32\], got \[16, 32\]"
    ):
        Gguf().read(file, "model.layers.0.self_attn.k_proj", (32, 32))
    with pytest.raises(FormatError, match="not from Tensors"):
        Gguf().read(Tensors({}), "a", (1, 1))


def test_rows_left_in_ggmls_order_show(tmp_path: Path) -> None:
    """Planted fault: the rows of q stay in the file's order."""
    tensors = write(tmp_path / "m.gguf")
    file = opened(tmp_path / "m.gguf")
    file._heads.clear()
    name = "model.layers.0.self_attn.q_proj"
    read_back = Gguf().read(file, name, (32, 32))
    assert read_back is not None and not torch.equal(read_back.weight.dequantize(), tensors[f"{name}.weight"])
