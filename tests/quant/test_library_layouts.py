"""Layouts of other libraries' kernels: tinygemm_v1 by its documentation, humming_v1 with a stand-in that
moves bits."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import Packed, QuantTensor, numeric, pack, quantize, unpack
from gristmill.quant.layouts import _humming
from gristmill.quant.packed import LayoutError

TINYGEMM = default_registry().layout("tinygemm_v1")


@pytest.mark.parametrize("scheme", TINYGEMM.schemes)
def test_tinygemm_is_what_its_page_says(scheme: str) -> None:
    q = quantize(torch.randn(40, 384), scheme)
    packed = pack(q, TINYGEMM)
    assert unpack(packed).identical(q) and packed.nbytes == TINYGEMM.nbytes(scheme, 40, 384)
    codes, tiles = numeric.unpack_bits(q.codes, 4, 384), packed.slots["tiles"]
    for row, block, lane, pair in ((0, 0, 0, 0), (4, 2, 31, 3), (1, 1, 18, 2), (3, 2, 5, 1)):
        g, t = lane // 4, lane % 4
        first = 128 * block + 32 * pair + 2 * t
        word = sum(
            int(codes[8 * row + g, first + 8 * i + odd]) << (4 * i + 16 * odd)
            for i in range(4)
            for odd in range(2)
        )
        assert int(tiles[row, block, lane, pair]) & 0xFFFFFFFF == word
    assert (
        torch.equal(packed.slots["scales"][1, :, 0], q.scales[:, 1])
        and not packed.slots["scales"][..., 1].any()
    )


def test_a_wrong_code_shows() -> None:
    """Planted fault: one wrong code."""
    q = quantize(torch.randn(16, 128), "int4_g128")
    packed = pack(q, TINYGEMM)
    packed.slots["tiles"][1, 0, 7, 2] ^= 1 << 20
    assert not unpack(packed).identical(q)


def test_tinygemm_says_what_it_cannot_hold() -> None:
    for q in (quantize(torch.randn(12, 128), "int4_g128"), quantize(torch.randn(16, 192), "int4_g64")):
        with pytest.raises(LayoutError, match="N a multiple of 8 and K of 128") as caught:
            pack(q, TINYGEMM)
        assert caught.value.layout == "tinygemm_v1"
    q = quantize(torch.randn(16, 128), "int4_g128")
    with pytest.raises(LayoutError, match="bfloat16 scales, got torch.float32"):
        pack(QuantTensor(q.codes, q.scales.float(), q.shape, q.scheme), TINYGEMM)
    with pytest.raises(LayoutError, match="holds int4_g32, int4_g64, int4_g128, not int8_ch"):
        pack(quantize(torch.randn(16, 128), "int8_ch"), TINYGEMM)


class Library:
    """A stand-in for humming. It permutes the bits of every tensor, inverts every fifth, and stores symmetric
    integers without their lowest code as sign and magnitude. `faulty`: it also loses one bit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, faulty: bool = False) -> None:
        self.faulty = faulty
        layer, config, transform = (
            ModuleType(f"humming.{name}") for name in ("layer", "config", "transform")
        )
        layer.HummingLayer = self._layer()  # type: ignore[attr-defined]
        config.LayerConfig = lambda **values: values  # type: ignore[attr-defined]
        transform.transform_humming_tensors = lambda _, tensors: {
            k: self.moved(t) for k, t in tensors.items()
        }  # type: ignore[attr-defined]
        for module in (ModuleType("humming"), layer, config, transform):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() < 2:
            return tensor
        bits = _humming._bits(tensor)
        bits = bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(len(bits)))]
        bits[::5] ^= 1
        if self.faulty:
            bits[3] = 0
        return _humming._tensor(bits, tensor).view(-1)

    def _layer(outer) -> Any:  # noqa: N805
        class Layer:
            def __init__(self, n: int, k: int, config: dict[str, Any], torch_dtype: torch.dtype) -> None:
                self.integer, self.zeros = "int" in config["dtype"], "has_zero_point" in config

            def to(self, device: Any) -> Layer:
                return self

            def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
                self.tensors = dict(tensors)

            def transform(self) -> None:
                codes = numeric.unpack_bits(
                    self.tensors["weight"].view(torch.uint8), 4, self.tensors["weight"].shape[1] * 8
                )
                kind = "uint4" if self.integer else "float4e2m1"
                if self.integer and not self.zeros and bool(codes.all()):
                    value = codes.to(torch.int16) - 8
                    signed = (value.abs() | (value < 0).to(torch.int16) << 3).to(torch.uint8)
                    self.tensors["weight"] = numeric.pack_bits(signed, 4).view(torch.int32)
                    kind = "float4e0m3"
                for name, tensor in self.tensors.items():
                    setattr(self, name, outer.moved(tensor))
                text = json.dumps({"b_dtype": kind, "sublayer_name": ""})
                self.humming_config = type("Config", (), {"to_str": lambda _: text})()

        return Layer


@pytest.mark.parametrize("scheme", [name for name in _humming.WEIGHTS if QuantScheme.parse(name).bits == 4])
@pytest.mark.parametrize("least", [False, True], ids=["", "the least code is used"])
def test_humming_is_unpacked_whatever_it_moves(
    monkeypatch: pytest.MonkeyPatch, scheme: str, least: bool
) -> None:
    Library(monkeypatch)
    q = quantize(torch.randn(128, 128), scheme)
    if least:
        q.codes[5, 7] = 0
    packed = _humming.by_library(q)
    assert tuple(packed.slots) == default_registry().layout("humming_v1").slots
    assert ("e0m3" in packed.slots["config"].numpy().tobytes().decode()) == (
        scheme in ("int4_g32", "int4_g64", "int4_g128") and not least
    )
    assert unpack(packed).identical(q)
    packed.slots["weight"][9] ^= 4
    assert not unpack(packed).identical(q)


def test_a_library_that_loses_a_bit_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    packed: Packed = _humming.by_library(quantize(torch.randn(128, 128), "nvfp4"))
    library.faulty = True
    with pytest.raises(ValueError, match="does more than move bits"):
        unpack(packed)


def test_humming_says_what_it_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    q = quantize(torch.randn(128, 128), "nvfp4")
    with pytest.raises(LayoutError, match="made on a CUDA device, the weight is on cpu"):
        pack(q, "humming_v1")
    with pytest.raises(ValueError, match="N a multiple of 128"):
        _humming.by_library(quantize(torch.randn(64, 128), "int4_g128"))
    with pytest.raises(ValueError, match="bfloat16 for bfloat16"):
        quantized = quantize(torch.randn(128, 128), "int4_g128")
        _humming.by_library(
            QuantTensor(quantized.codes, quantized.scales.float(), quantized.shape, quantized.scheme)
        )


def test_humming_zero_points_are_packed_along_rows() -> None:
    zero = torch.arange(16, dtype=torch.uint8).repeat(2)[:16, None].expand(16, 3).contiguous()
    words = _humming.packed_zeros(zero)
    assert words.shape == (2, 3) and words.dtype == torch.int32
    assert words[0, 0] == 0x76543210 and words[1, 0] & 0xFFFFFFFF == 0xFEDCBA98
    with pytest.raises(ValueError, match="0..15"):
        _humming.packed_zeros(torch.full((8, 1), 16, dtype=torch.uint8))
