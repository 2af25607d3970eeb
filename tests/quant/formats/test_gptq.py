"""GPTQ from the definition of the format: hand-written bytes, and a packer that writes one value after
another into words."""

from __future__ import annotations

import pytest
import torch

from gristmill.quant import QuantTensor
from gristmill.quant.formats import FormatError, Tensors
from gristmill.quant.formats.gptq import Gptq

NAME = "model.layers.0.mlp.down_proj"


def words(values: list[int], bits: int) -> list[int]:
    """Packs values densely into int32 words, least significant bits first."""
    total = sum(v << (bits * i) for i, v in enumerate(values))
    count = -(-len(values) * bits // 32)
    actual = [(total >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [v - (1 << 32) if v >= 1 << 31 else v for v in actual]


def checkpoint(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, v2: bool
) -> dict[str, torch.Tensor]:
    """Returns the tensors on disk for codes [N, K], zeros and scales [N, G]."""
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    return {
        f"{NAME}.qweight": torch.tensor([words(row, bits) for row in codes.tolist()], dtype=torch.int32)
        .t()
        .contiguous(),
        f"{NAME}.qzeros": torch.tensor([words(row, bits) for row in stored.t().tolist()], dtype=torch.int32),
        f"{NAME}.scales": scales.t().contiguous(),
    }


def random(
    bits: int, n: int = 32, k: int = 64, group: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator)
    zeros = torch.randint(0, 1 << bits, (n, k // group), generator=generator)
    return codes, zeros, (torch.rand(n, k // group, generator=generator) + 0.1).half()


def config(bits: int, group: int = 16, **more: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **more}


def read(
    tensors: dict[str, torch.Tensor], settings: dict[str, object], shape: tuple[int, ...] = (32, 64)
) -> QuantTensor:
    read_back = Gptq(settings).read(Tensors(tensors), NAME, shape)
    assert read_back is not None and set(read_back.names) == set(tensors)
    return read_back.weight


def test_bytes_by_hand_4_bits() -> None:
    """One group of eight inputs, eight outputs: a nibble each. 0x77777777 is the symmetric zero of version 1."""
    qweight = torch.tensor(
        [[0x76543210, -1, 0, 0x11111111, 0x0F0F0F0F, 0x89, 0x7FFFFFFF, 0x01234567]], dtype=torch.int32
    )
    tensors = {
        f"{NAME}.qweight": qweight,
        f"{NAME}.qzeros": torch.tensor([[0x77777777]], dtype=torch.int32),
        f"{NAME}.scales": torch.tensor([[1, 2, 4, 8, 0.5, 1, 1, 1]], dtype=torch.float16),
    }
    w = read(tensors, config(4, 8, sym=True), (8, 8))
    assert str(w.scheme) == "int4_g8" and w.zero is None
    assert w.dequantize()[0].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]
    assert w.dequantize()[1].tolist() == [14.0] * 8
    assert w.dequantize()[2].tolist() == [-32.0] * 8
    assert w.dequantize()[4].tolist() == [3.5, -4] * 4
    assert w.dequantize()[5].tolist() == [1, 0, -8, -8, -8, -8, -8, -8]
    assert w.dequantize()[7].tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]
    tensors[f"{NAME}.qzeros"] = torch.tensor([[-0x77777778]], dtype=torch.int32)  # 0x88888888
    assert read(tensors, config(4, 8, sym=True, checkpoint_format="gptq_v2"), (8, 8)).identical(w)
    # planted fault: zeros of version 2 read as version 1 are one too high
    wrong = read(tensors, config(4, 8, sym=True), (8, 8))
    assert torch.equal(wrong.dequantize() + wrong.scales.float(), w.dequantize())


def test_bytes_by_hand_3_bits() -> None:
    """32 values in 3 words; values 10 and 21 cross a word boundary. 0, 1 ... 7, 0, 1 ... in octal is 76543210
    repeated."""
    stream = int("76543210" * 4, 8)
    word = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(3)]
    signed = [v - (1 << 32) if v >= 1 << 31 else v for v in word]
    tensors = {
        f"{NAME}.qweight": torch.tensor(signed, dtype=torch.int32)[:, None].expand(3, 32).contiguous(),
        f"{NAME}.qzeros": torch.tensor([signed], dtype=torch.int32),
        f"{NAME}.scales": torch.ones(1, 32, dtype=torch.float16),
    }
    w = read(tensors, config(3, -1, checkpoint_format="gptq_v2"), (32, 32))
    assert str(w.scheme) == "int3_ch_zp"
    assert w.unpacked()[5].tolist() == list(range(8)) * 4
    assert w.zero[:, 0].tolist() == list(range(8)) * 4
    v1 = read(tensors, config(3, -1), (32, 32))
    assert v1.zero[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0] * 4  # plus one, modulo 8


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("order", ["none", "regular", "shuffled"])
def test_every_width(bits: int, v2: bool, order: str) -> None:
    codes, zeros, scales = random(bits)
    tensors = checkpoint(codes, zeros, scales, bits, v2)
    group = torch.arange(64) // 16
    if order == "shuffled":
        group = group[torch.randperm(64, generator=torch.Generator().manual_seed(3))]
    if order != "none":
        tensors[f"{NAME}.g_idx"] = group.to(torch.int32)
    w = read(
        tensors, config(bits, checkpoint_format="gptq_v2" if v2 else "gptq", desc_act=order == "shuffled")
    )
    expected = (codes - zeros[:, group]).float() * scales.float()[:, group]
    assert torch.equal(w.dequantize(), expected)
    assert torch.equal(w.unpacked().long(), codes) and (w.g_idx is None) == (order != "shuffled")
    for dim in (0, 1):  # tensor-parallel slices, also with act-order
        parts = [w.shard(dim, rank, 2).dequantize() for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim), expected)


def test_symmetric_zeros_stay_implicit_only_where_they_are() -> None:
    codes, zeros, scales = random(4)
    half = torch.full_like(zeros, 8)
    tensors = checkpoint(codes, half, scales, 4, False)
    assert str(read(tensors, config(4, sym=True)).scheme) == "int4_g16"
    assert str(read(tensors, config(4, sym=False)).scheme) == "int4_g16_zp"
    half[3, 1] = 7
    odd = read(checkpoint(codes, half, scales, 4, False), config(4, sym=True))
    assert str(odd.scheme) == "int4_g16_zp" and int(odd.zero[3, 1]) == 7


def test_a_group_that_is_cut_short() -> None:
    """K = 40 in groups of 16: the third group has eight inputs."""
    codes, zeros, scales = random(4, k=48)
    tensors = checkpoint(codes[:, :40], zeros, scales, 4, True)
    w = read(tensors, config(4, checkpoint_format="gptq_v2"), (32, 40))
    group = torch.arange(40) // 16
    assert torch.equal(w.dequantize(), (codes[:, :40] - zeros[:, group]).float() * scales.float()[:, group])


def test_dynamic_rules() -> None:
    read_back = Gptq(
        config(
            4,
            128,
            sym=True,
            dynamic={
                r"-:.*\.o_proj": {},
                r"+:model\.layers\.1\..*": {"bits": 8, "group_size": 32, "sym": False},
                r".*gate.*": {"bits": 3},
            },
        )
    )
    assert read_back.rule("model.layers.0.self_attn.o_proj") is None
    assert read_back.rule("model.layers.1.self_attn.q_proj") == (8, 32, False)
    assert read_back.rule("model.layers.2.mlp.gate_proj") == (3, 128, True)
    assert read_back.rule("model.layers.2.mlp.up_proj") == (4, 128, True)
    codes, zeros, scales = random(4)
    tensors = Tensors(checkpoint(codes, zeros, scales, 4, False))
    with pytest.raises(FormatError, match="says it is not quantized, but there is"):
        Gptq(config(4, dynamic={r"-:.*down.*": {}})).read(tensors, NAME, (32, 64))
    # Inferred: there is no qweight.
    assert Gptq(config(4)).read(tensors, "model.layers.0.mlp.up_proj", (32, 64)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "one of 2, 3, 4, 8, got 5"),
        ({"bits": "4"}, "must be int, got '4'"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"dynamic": {"+:((": {}}}, "regular expression"),
        ({"dynamic": {"-:(a|aa)+b": {}}}, r"dynamic: matching '\(a\|aa\)\+b' could take forever"),
        ({"dynamic": {"+:a": {"bits": 7}}}, "got 7"),
        ({"bits": None}, "'bits' is missing"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Gptq(config(4) | change)


def test_tensors_that_do_not_fit() -> None:
    codes, zeros, scales = random(4)
    tensors = checkpoint(codes, zeros, scales, 4, False)
    cases = [
        ("qzeros", None, "needs tensor .*qzeros"),
        ("qweight", torch.zeros(8, 31, dtype=torch.int32), r"shape \[8, 32\], got \[8, 31\]"),
        ("scales", torch.zeros(4, 32, dtype=torch.int32), "float32, got torch.int32"),
        ("g_idx", torch.full((64,), 4, dtype=torch.int32), r"groups 0\.\.3, got 4\.\.4"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), r"shape \[64\]"),
    ]
    for part, value, message in cases:
        changed = {k: v for k, v in tensors.items() if k != f"{NAME}.{part}"}
        with pytest.raises(FormatError, match=message):
            Gptq(config(4)).read(
                Tensors(changed | ({} if value is None else {f"{NAME}.{part}": value})), NAME, (32, 64)
            )
    with pytest.raises(FormatError, match="fills int32 words"):
        Gptq(config(4)).read(Tensors(tensors), NAME, (32, 63))


def test_an_order_without_its_index_is_refused() -> None:
    """Without g_idx the columns of a desc_act file would be read with other groups."""
    tensors = checkpoint(*random(4), 4, v2=False)
    with pytest.raises(
        FormatError, match=rf"desc_act says that columns are in an order, and there is no {NAME}.g_idx"
    ):
        read(tensors, config(4, desc_act=True))
    codes, zeros, scales = random(4, group=64)  # a single group has no order
    assert read(checkpoint(codes, zeros, scales, 4, v2=False), config(4, 64, desc_act=True)).g_idx is None


def test_marlin_by_its_flag_is_refused() -> None:
    with pytest.raises(FormatError, match="is_marlin_format: weights in Marlin's order are not read"):
        Gptq(config(4, is_marlin_format=True))
    assert not Gptq(config(4, is_marlin_format=False)).ordered
