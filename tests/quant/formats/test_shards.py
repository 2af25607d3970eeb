"""Tensor-parallel slices of the result of every reader: joined shards equal the whole, also when cut inside
groups and blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill.quant import QuantTensor, concat, quantize, stack
from gristmill.quant.formats import Tensors, open_format, open_writer
from tests.quant.oracle import weight
from tests.runtime import producers
from tests.runtime.test_fuzz import FAMILIES, NAMES, SHAPE

N, K = 192, 256
WRITTEN = (
    [
        ("compressed-tensors", s)
        for s in (
            "int8_ch.int8_token",
            "int3_ch",
            "int4_g128",
            "fp8",
            "fp8_ch",
            "fp8_block",
            "mxfp4",
            "mxfp8",
        )
    ]
    + [("modelopt", s) for s in ("mxfp4", "mxfp8", "fp8_ch")]
    + [("gptq", s) for s in ("int2_g64", "int4_ch", "int8_g32_zp")]
)


def of_family(name: str) -> QuantTensor:
    tensors, config = FAMILIES[name]()
    read_back = open_format(config).read(Tensors(tensors), NAMES[0], SHAPE)
    assert read_back is not None
    return read_back.weight


def of_writer(form: str, scheme: str) -> QuantTensor:
    """200 rows where the format accepts them, so that a block is partial."""
    n = N if form == "gptq" else 200
    writer = open_writer(form, scheme)
    tensors = {f"m.{suffix}": t for suffix, t in writer.tensors(writer.quantize(weight(n, K))).items()}
    read_back = open_format(writer.config([])).read(Tensors(tensors), "m", (n, K))
    assert read_back is not None
    return read_back.weight


def act_order() -> QuantTensor:
    config, produce = producers.gptq(True)
    produced = produce("m", weight(N, K))
    assert produced is not None
    read_back = open_format(config).read(
        Tensors({f"m.{suffix}": t.contiguous() for suffix, t in produced[0].items()}), "m", (N, K)
    )
    assert (
        read_back is not None
        and read_back.weight.g_idx is not None
        and torch.equal(read_back.weight.dequantize(), produced[1])
    )
    return read_back.weight


READ: dict[str, Callable[[], QuantTensor]] = {
    **{name: lambda name=name: of_family(name) for name in FAMILIES},
    **{
        f"{form} {scheme}": lambda form=form, scheme=scheme: of_writer(form, scheme)
        for form, scheme in WRITTEN
    },
    "gptq act-order": act_order,
}


def check(q: QuantTensor) -> None:
    """Checks equal and unequal parts along both dimensions."""
    full = q.dequantize()
    for dim in (0, 1):
        size = q.shape[dim]
        cuts: list[list[int]] = [[size // world] * world for world in (2, 4, 8) if size % world == 0]
        for lengths in [*cuts, [50, size - 50], [1, 97, size - 98]]:
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            parts = [q.narrow(dim, start, length) for start, length in zip(starts, lengths, strict=True)]
            for part, start in zip(parts, starts, strict=True):
                assert torch.equal(part.dequantize(), full.narrow(dim, start, part.shape[dim]))
            assert torch.equal(concat(parts, dim).dequantize(), full)


@pytest.mark.parametrize("case", READ)
def test_shards_of_what_is_read(case: str) -> None:
    check(READ[case]())


def test_a_group_of_the_neighbour_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a rank that starts inside a group counts groups from its own first column."""
    from gristmill.quant import sharding

    real = sharding._renumber

    def misnumbered(index: torch.Tensor, size: int) -> Any:
        renumbered, _ = real(index, size)
        return (
            renumbered,
            None
            if index.numel() % size == 0 and renumbered.numel() == index.numel() // size
            else real(index, size)[1].flip(0),
        )

    monkeypatch.setattr(sharding, "_renumber", misnumbered)
    with pytest.raises(AssertionError):
        check(act_order())


@pytest.mark.parametrize("scheme", ["int4_g128", "fp8_block", "nvfp4"])
def test_replicated_heads(scheme: str) -> None:
    """Two heads of k among four ranks: ranks 0 and 1 hold the first, 2 and 3 the second; with q and v they
    form one matrix."""
    parts = {
        name: quantize(weight(rows, K, i), scheme)
        for i, (name, rows) in enumerate((("q", 256), ("k", 128), ("v", 128)))
    }
    for rank in range(4):
        head = rank * 2 // 4
        of_rank = [parts["q"].shard(0, rank, 4), *(parts[name].narrow(0, head * 64, 64) for name in "kv")]
        expected = [
            parts["q"].dequantize().chunk(4)[rank],
            *(parts[name].dequantize().chunk(2)[head] for name in "kv"),
        ]
        assert torch.equal(concat(of_rank, 0).dequantize(), torch.cat(expected))


@pytest.mark.parametrize("scheme", ["int4_g128_zp", "fp8_block", "nvfp4", "mxfp4"])
def test_experts_by_index(scheme: str) -> None:
    """A rank's experts, and a slice of each of them."""
    matrices = [quantize(weight(96, K, i), scheme) for i in range(6)]
    stacked = stack(matrices)
    for rank in range(3):
        of_rank = stacked.shard(0, rank, 3)
        assert of_rank.identical(stack(matrices[2 * rank : 2 * rank + 2]))
        assert torch.equal(
            of_rank.shard(1, 1, 2).dequantize(), stacked.dequantize()[2 * rank : 2 * rank + 2, 48:]
        )
    assert concat([stacked.shard(0, rank, 3) for rank in range(3)], 0).identical(stacked)


def test_experts_are_made_one_after_another() -> None:
    """stack takes experts from a generator and reports if there are too few or too many."""
    experts = (quantize(weight(8, 128, i), "int4_g32") for i in range(3))
    assert stack(experts, 3).shape == (3, 8, 128)
    for count, complaint in ((2, "expected 2 QuantTensors and got more"), (4, "expected 4, got 3")):
        with pytest.raises(ValueError, match=complaint):
            stack((quantize(weight(8, 128, i), "int4_g32") for i in range(3)), count)
