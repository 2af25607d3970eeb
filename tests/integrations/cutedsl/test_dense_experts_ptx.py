"""The program of experts' dense products for data-centre Blackwell computes what it should: its PTX, executed on a CPU (`experts_machine`).

Rows of x that are gathered, of which K need not be whole slots, lie where TMA would put them, on Hopper too.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cutlass import BFloat16, cute
from torch import Tensor

from gristmill.kernels.cutedsl import _sm90, _sm100
from gristmill.kernels.linear.op import gated
from gristmill.kernels.moe._clamped import ALPHA, clamped
from gristmill.kernels.moe.grouped_linear._cutedsl_sm100 import BM, grouped_linear
from gristmill.kernels.moe.grouped_linear.cutedsl import MACHINES, STEP
from tests.integrations.cutedsl.experts_machine import DenseExpertsCta, Experts
from tests.integrations.cutedsl.ptx_machine import Map, execute
from tests.integrations.cutedsl.ptx_text import ptx_of
from tests.integrations.cutedsl.test_linear_sm100_ptx import Memory

LIMIT = 1.5


class Case(NamedTuple):
    """A product of experts with so many rows each; gather: top_k, or 0; foreign: rows of no expert; ctas: that share the tiles."""

    bn: int
    rows: tuple[int, ...]
    n: int
    k: int
    epilogue: str = "none"
    gather: int = 0
    foreign: int = 0
    ctas: int = 2


@cache
def ptx(bn: int, epilogue: str, gather: bool) -> str:
    """The PTX of a configuration."""
    config = {"bm": BM, "bn": bn, "slots": MACHINES[1].tiles[BM, bn], "epilogue": epilogue, "gather": gather}
    return ptx_of(grouped_linear({**config, "x": "bf16", "arch": "sm_100a"}), "sm_100a")


def run(case: Case, seed: int, text: str = "") -> tuple[Tensor, Tensor]:
    """What the program computes, and what it should."""
    generator, flags, memory = torch.Generator().manual_seed(seed), case.epilogue.split("+"), Memory()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    experts, places = len(case.rows), sum(case.rows) + case.foreign
    columns, top_k = case.n // 2 if "silu_mul" in flags else case.n, max(1, case.gather)
    tokens = -(-places // top_k)
    offsets = torch.tensor([0, *np.cumsum(case.rows)], dtype=torch.int32)
    permutation = torch.randperm(tokens * top_k, generator=generator)[:places].int()
    x, w, bias = draw(tokens, case.k), draw(experts, case.n, case.k), draw(experts, case.n)
    x[0, 0] = float("inf")  # what lies past K in a slot must be zero, not a number times zero
    (of_x, matrix_x), (_, matrix_w) = memory.matrix(x), memory.put(w)
    packed, out = memory.matrix(torch.zeros(places, columns).bfloat16().fill_(float("nan")))
    of_w = matrix_w.view(np.uint16).reshape(experts, case.n, case.k)
    parameters: list[bytes | Map] = [bytes(32), bytes(32)]
    parameters += [Map(matrix_x, (BM, STEP), 128), struct.pack("<ii", tokens, case.k)]
    parameters += [Experts(of_w, (case.bn // 2, STEP), 128), struct.pack("<iii", case.n, case.k, experts)]
    parameters += [of_x, memory.matrix(permutation)[0], struct.pack("<i", top_k), memory.matrix(offsets)[0]]
    parameters += [memory.matrix(bias)[0], struct.pack("<f", ALPHA), struct.pack("<f", LIMIT), packed]
    text = text or ptx(case.bn, case.epilogue, bool(case.gather))
    execute(text, parameters, memory.bytes, case.ctas, seed, DenseExpertsCta)
    source = permutation.long() // top_k if case.gather else torch.arange(places)
    expected = torch.zeros(places, columns)
    for e in range(experts):
        here = slice(int(offsets[e]), int(offsets[e + 1]))
        z = x[source[here]].float() @ w[e].float().T
        z = z + bias[e].float() if "bias" in flags else z
        if "clamp" in flags:
            z = clamped(z, ALPHA, LIMIT)
        expected[here] = gated(z) if "silu_mul" in flags and "clamp" not in flags else z
    return torch.from_numpy(out.copy().view(np.int16)).view(torch.bfloat16), expected.bfloat16()


CASES = [
    Case(128, (0, 1, 131), 136, 72, gather=3, foreign=5),
    Case(128, (7, 130), 192, 200, "bias+clamp+silu_mul", gather=2),
    Case(128, (3, 0, 129), 72, 88, "bias"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_computes_what_it_should(case: Case) -> None:
    out, expected = run(case, seed=CASES.index(case))
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2e-2, equal_nan=True)
    assert not bool(out[sum(case.rows) :].float().any()), "rows of no expert are 0"


def test_columns_past_k_that_are_not_zero_are_seen() -> None:
    """Copies of whole 16 bytes instead of none read the first ones of x, which are finite times zero, or infinity times zero."""
    case = CASES[0]
    text, count = re.subn(
        r"(cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 16), (?:%r\d+|0);",
        r"\1, 16;",
        ptx(case.bn, case.epilogue, True),
    )
    assert count
    spoiled, expected = run(case._replace(k=8), 0, text)
    assert not torch.allclose(spoiled.float(), expected.float(), atol=1, equal_nan=True)


@pytest.mark.parametrize("rows", [64, 128])
def test_rows_are_gathered_to_where_cute_has_them(rows: int) -> None:
    """Row r of a slot begins after r times 128 bytes, and its pieces of 16 bytes are exchanged by r % 8, on Hopper and Blackwell."""
    pieces = [(row, column) for row in range(rows) for column in range(0, STEP, 8)]
    places: dict[str, list[int]] = {"sm_90a": [], "sm_100a": []}
    swizzles: list[str] = []

    @cute.jit
    def record():
        hopper = _sm90.ring_layout(BFloat16, rows, STEP, 3)
        swizzles.append(str(hopper.inner))
        places["sm_90a"].extend(hopper.outer((row, column, 2)) for row, column in pieces)
        if rows == BM:
            blackwell = _sm100.Operands(BFloat16, 128, STEP, 3).x
            swizzles.append(str(blackwell.inner))
            at = [((row, column % 16), 0, column // 16, 2) for row, column in pieces]
            places["sm_100a"].extend(blackwell.outer(one) for one in at)

    cute.compile(record, options="--gpu-arch sm_100a")
    assert set(swizzles) == {"S<3,4,3>"}, "which exchanges pieces as `Gather` does"
    expected = [2 * rows * STEP + row * STEP + column for row, column in pieces]
    assert places["sm_90a"] == expected and (rows != BM or places["sm_100a"] == expected)
