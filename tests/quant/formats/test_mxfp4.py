"""gpt-oss MXFP4 compared with transformers' own dequantization."""

from __future__ import annotations

import pytest
import torch

from gristmill.quant.formats import FormatError, Tensors
from gristmill.quant.formats.contract import deinterleaved
from gristmill.quant.formats.mxfp4 import Mxfp4

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def stored(e: int, n: int, k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (e, n, k // 32, 16), generator=generator, dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(110, 140, (e, n, k // 32), generator=generator, dtype=torch.uint8),
    }


def test_values_are_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = stored(3, 10, 96)
    expected = mxfp4.convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32)  # [E, K, N]
    read_back = Mxfp4({"quant_method": "mxfp4"}).read(Tensors(tensors), NAME, (3, 10, 96))
    assert read_back is not None and torch.equal(read_back.weight.dequantize(), expected.transpose(1, 2))
    parted = deinterleaved(read_back.weight).dequantize()
    assert torch.equal(parted[:, :5], expected.transpose(1, 2)[:, 0::2])
    assert torch.equal(parted[:, 5:], expected.transpose(1, 2)[:, 1::2])


def test_refusals() -> None:
    reader, tensors = Mxfp4({}), stored(2, 4, 64)
    assert reader.read(Tensors({}), NAME, (2, 4, 64)) is None
    with pytest.raises(FormatError, match=r"shape \[2, 4, 3, 16\], got \[2, 4, 2, 16\]"):
        reader.read(Tensors(tensors), NAME, (2, 4, 96))
    with pytest.raises(FormatError, match="blocks of 32 along K, and K is 50"):
        reader.read(Tensors(tensors), NAME, (2, 4, 50))
    with pytest.raises(FormatError, match="finite"):
        reader.read(
            Tensors(tensors | {f"{NAME}_scales": torch.full((2, 4, 2), 255, dtype=torch.uint8)}),
            NAME,
            (2, 4, 64),
        )
    with pytest.raises(FormatError, match=r"may pass float32: up to 1e\+39"):
        reader.read(
            Tensors(tensors | {f"{NAME}_scales": torch.full((2, 4, 2), 254, dtype=torch.uint8)}),
            NAME,
            (2, 4, 64),
        )
    with pytest.raises(FormatError, match="needs tensor .*_scales; found .*_blocks"):
        reader.read(Tensors({f"{NAME}_blocks": tensors[f"{NAME}_blocks"]}), NAME, (2, 4, 64))
