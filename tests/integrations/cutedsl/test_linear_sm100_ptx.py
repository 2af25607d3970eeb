"""The programs of linear for data-centre Blackwell compute what they should: their PTX, executed on a CPU (`ptx_machine`).

Which lane of which warp reads what, when slots are filled and freed, descriptors, swizzles and coordinates are those of the compiled program; the
numbers are exact but for the order of sums. Tensor maps are made here: the host part of a program, which encodes them, does not run.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.linear.cutedsl_sm100._dense import dense_product
from gristmill.kernels.linear.cutedsl_sm100._fp8 import fp8_product
from gristmill.kernels.linear.cutedsl_sm100.shapes import BLOCKS, ROWS, WHOLE, Tile
from gristmill.kernels.linear.op import gated
from tests.integrations.cutedsl.ptx_machine import Map, execute
from tests.integrations.cutedsl.ptx_text import ptx_of

EVERYTHING = "bias+residual+silu_mul"


class Memory:
    """Global memory: tensors one after another."""

    def __init__(self) -> None:
        self.bytes, self.end = np.full(8 << 20, 0xFF, np.uint8), 256

    def put(self, tensor: Tensor) -> tuple[int, Any]:
        """The address of a copy of a tensor, and the copy."""
        raw = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        address, self.end = self.end, self.end + -(-raw.nbytes // 256) * 256
        self.bytes[address : address + raw.nbytes] = raw
        return address, self.bytes[address : address + raw.nbytes]

    def matrix(self, tensor: Tensor) -> tuple[bytes, Any]:
        """The parameter of a matrix or vector whose rows follow each other, and the matrix there as integers of its width."""
        address, raw = self.put(tensor)
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[tensor.element_size()]
        shape = tuple(tensor.shape)
        packed = (
            struct.pack("<qiiq", address, *shape, shape[1])
            if len(shape) == 2
            else struct.pack("<qii", address, *shape, 0)
        )
        return packed, raw.view(kind).reshape(shape)


@cache
def ptx(dense: bool, config: tuple[tuple[str, Any], ...], arch: str = "sm_100a") -> str:
    """The PTX of a configuration."""
    return ptx_of((dense_product if dense else fp8_product)(dict(config)), arch)


class Case(NamedTuple):
    """A product, its tile and what follows it.

    Attributes:
        scales: `none`, of `rows` or of `blocks`. cut: rows of W that the first block row has.
        ctas: that share the tiles.
    """

    tile: Tile
    m: int
    n: int
    k: int
    epilogue: str = "none"
    x: str = "bf16"
    scales: str = "none"
    cut: int = 128
    ctas: int = 2

    @property
    def config(self) -> Config:
        own = {"epilogue": self.epilogue, "x": self.x, "arch": "sm_100a", "ctas": self.ctas}
        return {**self.tile._asdict(), **own} | (
            {} if self.scales == "none" else {"blocks": self.scales == "blocks"}
        )


def run(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """What a program computes, and what it should."""
    generator, flags = torch.Generator().manual_seed(seed), case.epilogue.split("+")
    dtype = torch.bfloat16 if case.x == "bf16" else torch.float16
    (m, n, k), groups = case[1:4], -(-case.k // 128)
    columns = n // 2 if "silu_mul" in flags else n
    operand = dtype if case.scales == "none" else torch.float8_e4m3fn
    x, w = (torch.randn(rows, k, generator=generator).to(operand) for rows in (m, n))
    memory, width = Memory(), min(64, case.tile.bn // (2 if "silu_mul" in flags else 1) // case.tile.quads)
    (_, of_x), (_, of_w) = memory.matrix(x), memory.matrix(w)
    packed, out = memory.matrix(torch.zeros(m, columns, dtype=dtype).fill_(float("nan")))
    step = 128 // x.element_size()
    store: list[bytes | Map] = [Map(out, (32, width), width * 2), struct.pack("<ii", m, columns)]
    maps: list[bytes | Map] = [bytes(32), bytes(32), Map(of_x, (ROWS, step), 128), struct.pack("<ii", m, k)]
    maps += [Map(of_w, (case.tile.bn // 2, step), 128), struct.pack("<ii", n, k)]
    left, right, tensors = x.float(), w.float(), []
    if case.scales == "none":
        maps += store
    else:
        blocks = case.scales == "blocks"
        pitch, count = -(-m // 4) * 4, groups if blocks else 1
        x_scales = torch.rand(count, pitch, generator=generator) + 0.5
        row_block = ((torch.arange(n, dtype=torch.int32) + 128 - case.cut) // 128).int()
        w_scales = torch.rand(int(row_block[-1]) + 1 if blocks else n, count, generator=generator) + 0.5
        address, raw = memory.put(x_scales)
        of_groups = raw.view(np.float32).reshape(count, pitch)[:, :m]
        maps += [Map(of_groups, (1, ROWS), 0), struct.pack("<ii", m, count)] if blocks else store
        tensors = [struct.pack("<qiiq", address, m, count, pitch), memory.matrix(w_scales)[0]]
        tensors += [memory.matrix(row_block)[0]] if blocks else []
        by_column = w_scales[row_block.long()] if blocks else w_scales
        left, right = (
            codes * factors.repeat_interleave(128 if blocks else k, 1)[:, :k]
            for codes, factors in ((left, x_scales.T[:m]), (right, by_column))
        )
    bias = torch.randn(n, generator=generator).to(dtype)
    residual = torch.randn(m, columns, generator=generator).to(dtype)
    tensors.append(memory.matrix(bias)[0] if "bias" in flags else packed)
    tensors.append(memory.matrix(residual)[0] if "residual" in flags else packed)
    text = ptx(case.scales == "none", tuple(case.config.items()))
    execute(text, [*maps, *store, *tensors, packed], memory.bytes, case.ctas, seed)
    z = left @ right.T
    z = z + bias.float() if "bias" in flags else z
    z = gated(z) if "silu_mul" in flags else z
    expected = z + residual.float() if "residual" in flags else z
    return torch.from_numpy(out.copy().view(np.int16)).view(dtype), expected.to(dtype)


CASES = [
    Case(WHOLE[2], 150, 72, 72),
    Case(WHOLE[0], 130, 264, 136, "bias", "fp16"),
    Case(WHOLE[1], 257, 272, 200, EVERYTHING),
    Case(WHOLE[2], 3, 80, 640, EVERYTHING, ctas=1),
    Case(WHOLE[2], 130, 72, 272, "bias", scales="rows"),
    Case(WHOLE[0], 130, 272, 144, EVERYTHING, scales="rows"),
    Case(BLOCKS[0], 150, 264, 528, scales="blocks"),
    Case(BLOCKS[0], 130, 304, 272, EVERYTHING, scales="blocks", cut=72),
    Case(BLOCKS[1], 150, 272, 656, EVERYTHING, scales="blocks"),
    Case(BLOCKS[1], 130, 136, 1168, "residual", scales="blocks", cut=41, ctas=1),
    Case(BLOCKS[2], 129, 136, 272, "bias", "fp16", "blocks", ctas=3),
    Case(BLOCKS[2], 3, 80, 1296, EVERYTHING, scales="blocks", cut=9, ctas=1),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.scales}-{case.tile.bn}-{case.m}-{case.n}-{case.k}-{case.epilogue}"
)
def test_a_program_computes_what_it_should(case: Case) -> None:
    out, expected = run(case, seed=CASES.index(case))
    torch.testing.assert_close(out, expected, rtol=2**-7 if case.x == "bf16" else 2**-10, atol=2e-2)


@pytest.mark.parametrize("case", [CASES[2], CASES[7]], ids=["dense", "fp8"])
def test_the_ptx_for_sm_103_is_the_same(case: Case) -> None:
    own, other = (
        ptx(case.scales == "none", tuple(case.config.items()), arch).splitlines()
        for arch in ("sm_100a", "sm_103a")
    )
    assert [pair for pair in zip(own, other, strict=True) if pair[0] != pair[1]] == [
        (".target sm_100a", ".target sm_103a")
    ]
