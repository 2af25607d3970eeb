"""Packing in C++ against packing in torch: the same bits, for every scheme and for sizes that are no multiple of a tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES
from gristmill.quant import QuantTensor, native, pack, unpack
from gristmill.quant.formats import args as format_args
from gristmill.quant.formats import awq, gguf_blocks
from gristmill.quant.formats.gguf_blocks import read_blocks
from gristmill.quant.layouts import _cpu_rows16
from gristmill.quant.layouts import args as layout_args
from gristmill.quant.tensor import same_bits
from tests.quant.formats.test_gguf import random_blocks
from tests.quant.oracle import variants

CODES = native.packing_function("gm_rows16_codes", layout_args.CODES)
AWQ = native.packing_function("gm_awq_rows", format_args.AWQ)
BLOCKS = native.packing_function("gm_gguf_blocks", format_args.BLOCKS)


@pytest.fixture(autouse=True)
def built() -> None:
    assert None not in (CODES, BLOCKS, AWQ), "the C++ library is not built: run `make build`"


def without(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(module, "packing_function", lambda *_: None)


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
def test_rows16_is_what_torch_packs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`variants` has experts, segments, act-order, odd rows, and columns that need padding."""
    weights = variants(name)
    packed = [pack(weight, "cpu_rows16_v1") for weight in weights]
    without(monkeypatch, _cpu_rows16)
    for weight, mine in zip(weights, packed, strict=True):
        expected = pack(weight, "cpu_rows16_v1")
        assert (mine.shape, mine.segments, mine.row_blocks) == (
            expected.shape,
            expected.segments,
            expected.row_blocks,
        )
        for slot, tensor in expected.slots.items():
            assert same_bits(mine.slots[slot], tensor), (weight, slot)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 257])
@pytest.mark.parametrize("name", ["int4_g32", "int8_ch", "bf16", "fp32", "mxfp4"])
def test_rows_and_strides(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are no multiple of a tile of 16, and codes that are rows of a wider tensor."""
    k = 32 * 5
    scheme_bytes = {"int4_g32": k // 2, "int8_ch": k, "bf16": 2 * k, "fp32": 4 * k, "mxfp4": k // 2}[name]
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, scheme_bytes + 64), dtype=torch.uint8, generator=generator)[:, 64:]
    scales: torch.Tensor | None = None
    if name == "mxfp4":
        scales = torch.randint(1, 250, (n, k // 32), dtype=torch.uint8, generator=generator)
    elif name.startswith("int"):
        scales = torch.rand(n, k // 32 if name == "int4_g32" else 1, generator=generator).half()
    weight = QuantTensor(codes, scales, (n, k), name)
    mine = pack(weight, "cpu_rows16_v1")
    assert unpack(mine).identical(QuantTensor(codes.contiguous(), scales, (n, k), name))
    without(monkeypatch, _cpu_rows16)
    expected = pack(weight, "cpu_rows16_v1")
    assert all(same_bits(mine.slots[slot], tensor) for slot, tensor in expected.slots.items())


def test_the_c_function_writes_its_lines_only() -> None:
    """Guard bands stay; every byte between them is written."""
    assert CODES is not None
    n, words = 19, 21
    source = torch.randint(0, 256, (n, 4 * words), dtype=torch.uint8)
    lines = torch.full((64 + 2 * words * 64 + 64,), 0xA5, dtype=torch.uint8)
    valid = {"rows": source.data_ptr(), "row_bytes": 4 * words, "n": n, "words": words, "nibbles": 0}
    valid |= {"padding": 0x80808080, "packed": lines[64:].data_ptr()}
    CODES(**valid)
    assert bool((lines[:64] == 0xA5).all()) and bool((lines[-64:] == 0xA5).all())
    blocks = lines[64:-64].view(2, words, 16, 4)
    rows = blocks.transpose(1, 2).reshape(32, 4 * words)
    assert torch.equal(rows[:n], source) and bool((rows[n:] == 0x80).all())
    with pytest.raises(ValueError, match="gm_rows16_codes: code -2"):
        CODES(**valid | {"row_bytes": 4 * words - 4})
    with pytest.raises(TypeError, match="takes rows, row_bytes, n, words, nibbles, padding, packed, got n"):
        CODES(n=n)


@pytest.mark.parametrize("kind", gguf_blocks._NATIVE)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (257, 64), (3, 5, 64)])
def test_blocks_are_what_torch_reads(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = int(np.prod(shape[:-1]))
    data = torch.from_numpy(random_blocks(kind, rows, shape[-1] // 32)).view(*shape[:-1], -1)
    if kind == "MXFP4":
        data.view(-1, 17)[:, 0] %= 200  # larger exponents are refused
    wide = torch.zeros(*data.shape[:-1], data.shape[-1] + 6, dtype=torch.uint8)
    wide[..., 6:] = data
    memory: list[torch.Tensor] = []

    def place(size: tuple[int, ...]) -> torch.Tensor:
        memory.append(torch.full((int(np.prod(size)) + 128,), 0xA5, dtype=torch.uint8))
        return memory[-1][64:-64].view(size)

    mine = [read_blocks("w", kind, data, shape, place), read_blocks("w", kind, wide[..., 6:], shape)]
    assert all(bool((m[:64] == 0xA5).all() and (m[-64:] == 0xA5).all()) for m in memory) and len(memory) == 1
    without(monkeypatch, gguf_blocks)
    expected = read_blocks("w", kind, data, shape)
    assert all(weight.identical(expected) for weight in mine)


@pytest.mark.parametrize(
    ("k", "columns"), [(8, 1), (64, 3), (128, 16), (136, 17), (1032, 40), (12, 2), (7, 1)]
)
def test_awq_is_what_torch_reads(k: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A K that is no multiple of 8 is left to torch."""
    words = torch.randint(-(1 << 31), 1 << 31, (k, columns), generator=torch.Generator().manual_seed(k))
    words = words.to(torch.int32)
    memory = torch.full((columns * 8 * ((k + 1) // 2) + 128,), 0xA5, dtype=torch.uint8)
    mine = awq.rows(words, lambda size: memory[64:-64].view(size))
    strided = awq.rows(words.t().contiguous().t())
    assert bool((memory[:64] == 0xA5).all() and (memory[-64:] == 0xA5).all())
    without(monkeypatch, awq)
    expected = awq.rows(words)
    assert torch.equal(mine, expected) and torch.equal(strided, expected)
    assert not torch.equal(awq.rows(words ^ 1), expected)  # planted fault: one code of each word is another


def test_an_installation_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library_dir", lambda: tmp_path)
    assert native.packing_function.__wrapped__("gm_rows16_codes", layout_args.CODES) is None
    monkeypatch.undo()
    assert native.packing_function.__wrapped__("gm_no_such_function", layout_args.CODES) is None
