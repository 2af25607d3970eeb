"""AWQ: hand-written bytes, and the result of compressed-tensors' converter for the same tensors."""

from __future__ import annotations

import pytest
import torch

from gristmill.quant import QuantTensor
from gristmill.quant.formats import FormatError, Tensors
from gristmill.quant.formats.awq import Awq

NAME = "model.layers.0.self_attn.o_proj"
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def read(tensors: dict[str, torch.Tensor], shape: tuple[int, int], **change: object) -> QuantTensor:
    read_back = Awq(CONFIG | change).read(Tensors(tensors), NAME, shape)
    assert read_back is not None and set(read_back.names) == set(tensors)
    return read_back.weight


def test_bytes_by_hand() -> None:
    """One word holds, from its lowest nibble, columns 0 2 4 6 1 3 5 7."""
    word = 0x75316420
    tensors = {
        f"{NAME}.qweight": torch.tensor([[word], [0x00000001]] + [[0]] * 14, dtype=torch.int32),
        f"{NAME}.qzeros": torch.tensor([[0x7531_6420]], dtype=torch.int32),
        f"{NAME}.scales": torch.tensor([[1, 2, 4, 8, 16, 32, 64, 128]], dtype=torch.float16),
    }
    w = read(tensors, (8, 16), group_size=-1)
    assert str(w.scheme) == "int4_ch_zp"
    assert w.unpacked()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert w.unpacked()[:, 1].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert w.zero[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert w.dequantize()[:, 0].tolist() == [0.0] * 8
    # Nothing is added to the zero point.
    assert w.dequantize()[:, 2].tolist() == [0, -2, -8, -24, -64, -160, -384, -896]


def outside(n: int, k: int, zero_point: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)

    def words(rows: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (rows, n // 8), generator=generator).to(torch.int32)

    tensors = {
        f"{NAME}.qweight": words(k),
        f"{NAME}.scales": (torch.rand(k // 16, n, generator=generator) + 0.1).half(),
    }
    return tensors | ({f"{NAME}.qzeros": words(k // 16)} if zero_point else {})


@pytest.mark.parametrize("zero_point", [True, False])
def test_what_compressed_tensors_makes_of_it(zero_point: bool) -> None:
    module = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    from gristmill.quant.formats.compressed_tensors import CompressedTensors

    tensors = outside(40, 64, zero_point)
    converter = module.AutoAWQConverter(group_size=16, zero_point=zero_point)
    converted = converter.process(dict(tensors))
    config = converter.update_config(None).model_dump(mode="json")
    converted_weight = CompressedTensors(config).read(Tensors(converted), NAME, (40, 64))
    w = read(tensors, (40, 64), zero_point=zero_point)
    assert converted_weight is not None and str(w.scheme) == ("int4_g16_zp" if zero_point else "int4_g16")
    assert torch.equal(w.dequantize(), converted_weight.weight.dequantize())
    assert torch.equal(w.scales, converted_weight.weight.scales) and torch.equal(
        w.codes, converted_weight.weight.codes
    )


def test_an_order_that_is_wrong_shows() -> None:
    """Planted fault: nibbles are read in order, as in GPTQ."""
    from gristmill.quant.formats import words

    tensors = outside(8, 16, True)
    w = read(tensors, (8, 16))
    assert not torch.equal(words.codes(tensors[f"{NAME}.qweight"], 4, 8).t(), w.unpacked())


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "marlin", "exllama", "ipex"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(FormatError, match=f"AWQ version '{version}' is not read; known: gemm"):
        Awq(CONFIG | {"version": version})


def test_refusals() -> None:
    with pytest.raises(FormatError, match="4 bits, got 8"):
        Awq(CONFIG | {"bits": 8})
    tensors = outside(40, 64, True)
    with pytest.raises(FormatError, match=r"shape \[64, 5\], got \[64, 4\]"):
        Awq(CONFIG).read(
            Tensors(tensors | {f"{NAME}.qweight": torch.zeros(64, 4, dtype=torch.int32)}), NAME, (40, 64)
        )
    with pytest.raises(FormatError, match="multiple of 8"):
        Awq(CONFIG).read(Tensors(tensors), NAME, (41, 64))
    del tensors[f"{NAME}.qzeros"]
    with pytest.raises(FormatError, match="needs tensor .*qzeros"):
        Awq(CONFIG).read(Tensors(tensors), NAME, (40, 64))
    assert Awq(CONFIG).read(Tensors({}), NAME, (40, 64)) is None
