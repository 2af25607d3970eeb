"""The program of experts' block-scaled products for data-centre Blackwell computes what it should: its PTX, executed on a CPU (`experts_machine`).

Offsets are those of experts with no row, one, seven, and more than two tiles; rows of no expert follow.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS
from gristmill.kernels.linear.op import gated
from gristmill.kernels.moe._clamped import ALPHA, clamped
from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl._experts_sm100 import experts_product
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from gristmill.quant.layouts._scales128x4 import tiled
from tests.integrations.cutedsl.experts_machine import ExpertsCta
from tests.integrations.cutedsl.ptx_machine import Map, execute
from tests.integrations.cutedsl.ptx_text import ptx_of
from tests.integrations.cutedsl.test_block_scaled_ptx import operand
from tests.integrations.cutedsl.test_linear_sm100_ptx import Memory

LIMIT = 1.5
ODD = (0, 1, 7, 257, 0)
"""Rows of experts."""


class Case(NamedTuple):
    """A product of experts, its tile and what follows it; gather: top_k, or 0; foreign: rows of no expert; ctas: that share the tiles."""

    scheme: str
    bn: int
    rows: tuple[int, ...]
    n: int
    k: int
    epilogue: str = "none"
    gather: int = 0
    foreign: int = 0
    x: str = "bf16"
    ctas: int = 2


@cache
def ptx(scheme: str, bn: int, epilogue: str, gather: bool, x: str, arch: str = "sm_100a") -> str:
    """The PTX of a configuration."""
    config = {"scheme": scheme, "bn": bn, "slots": FORMS[scheme].slots(bn), "epilogue": epilogue}
    config |= {"gather": gather, "x": x, "ctas": 148, "arch": arch}
    return ptx_of(experts_product(config), arch)


def text_of(case: Case) -> str:
    return ptx(case.scheme, case.bn, case.epilogue, bool(case.gather), case.x)


def run(case: Case, seed: int, text: str = "") -> tuple[Tensor, Tensor]:
    """What the program computes, and what it should."""
    scheme, form, flags = QuantScheme.parse(case.scheme), FORMS[case.scheme], case.epilogue.split("+")
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if case.x == "bf16" else torch.float16
    experts, places = len(case.rows), sum(case.rows) + case.foreign
    columns, top_k = case.n // 2 if "silu_mul" in flags else case.n, max(1, case.gather)
    tokens = -(-places // top_k)
    offsets = torch.tensor([0, *np.cumsum(case.rows)], dtype=torch.int32)
    permutation = torch.randperm(tokens * top_k, generator=generator)[:places].int()
    x = torch.randn(tokens, case.k, generator=generator).to(dtype)
    w = quantize(torch.randn(experts, case.n, case.k, generator=generator), scheme.without_activation)
    given = quantize_activation(x, str(scheme.activation), by_row=True)
    slots, memory = pack(w, "scales128x4_v1").slots, Memory()
    one = torch.ones(1)
    x_factors = one if given.global_scale is None else given.global_scale.reshape(-1)
    factors = slots["row_scale"].reshape(-1) if scheme.has_global else one
    bias = torch.randn(experts, case.n, generator=generator).to(dtype)
    packed, out = memory.matrix(torch.zeros(places, columns, dtype=dtype).fill_(float("nan")))
    codes, scales = given.values.view(torch.uint8), given.scales.view(torch.uint8)
    weight = slots["codes"].flatten(0, 1), slots["scales"].flatten(0, 1)
    parameters: list[bytes | Map] = [bytes(16)] * 3
    parameters += operand(*weight, form.w, min(case.bn, 128), form.columns, form.group, form.mixed)
    parameters += [
        memory.matrix(one)[0]
        for one in (codes, tiled(scales).flatten(0, 1).view(torch.int32), x_factors, permutation)
    ]
    parameters += [struct.pack("<i", top_k)]
    parameters += [memory.matrix(one)[0] for one in (offsets, factors, bias.reshape(-1))]
    parameters += [struct.pack("<f", ALPHA), struct.pack("<f", LIMIT), packed]
    parameters += [struct.pack("<i", -(-case.k // form.columns))]
    execute(text or text_of(case), parameters, memory.bytes, case.ctas, seed, ExpertsCta)
    source = permutation.long() // top_k if case.gather else torch.arange(places)
    rows, expected = given.dequantize()[source], torch.zeros(places, columns)
    for e, own in enumerate(w.experts()):
        here = slice(int(offsets[e]), int(offsets[e + 1]))
        z = rows[here] @ own.dequantize().T
        z = z + bias[e].float() if "bias" in flags else z
        if "clamp" in flags:
            z = clamped(z, ALPHA, LIMIT)
        expected[here] = gated(z) if "silu_mul" in flags and "clamp" not in flags else z
    return torch.from_numpy(out.copy().view(np.int16)).view(dtype), expected.to(dtype)


CASES = [
    Case("nvfp4.nvfp4", 256, ODD, 256, 384, "bias+clamp+silu_mul", gather=3, foreign=5),
    Case("nvfp4.nvfp4", 64, ODD, 200, 128, foreign=3),
    Case("mxfp4.mxfp4", 128, (0, 0, 131, 0), 136, 384, "bias", ctas=1),
    Case("mxfp8.mxfp8", 256, (2, 0, 130), 384, 256, x="fp16", ctas=3),
    Case("mxfp8.mxfp8", 64, tuple(e % 3 for e in range(40)), 128, 128, gather=2, ctas=5),
    Case("mxfp4.mxfp8", 256, (7, 1), 512, 128, "silu_mul", gather=4, foreign=1),
    Case("mxfp4.mxfp8", 64, (3, 0, 129), 184, 256, "bias"),
    Case("mxfp4.mxfp8", 64, (0, 0), 64, 128, foreign=9, ctas=1),
    Case("nvfp4.nvfp4", 128, (5, 0, 130), 192, 96, gather=2, foreign=2),
    Case("mxfp4.mxfp4", 64, (1, 140), 72, 352, gather=3),
    Case("mxfp8.mxfp8", 128, (131, 2), 192, 160),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:2])))
def test_the_program_computes_what_it_should(case: Case) -> None:
    out, expected = run(case, seed=CASES.index(case))
    torch.testing.assert_close(out, expected, rtol=2**-7 if case.x == "bf16" else 2**-10, atol=2e-2)
    assert not bool(out[sum(case.rows) :].float().any()), "rows of no expert are 0"


FAULTY = CASES[1]


def test_a_missing_copy_of_scales_is_seen() -> None:
    out, expected = run(FAULTY, 0, re.sub(r"tcgen05\.cp[^;]*;", "", text_of(FAULTY), count=1))
    assert not torch.allclose(out.float(), expected.float(), atol=1, equal_nan=True)


def test_a_row_from_another_place_is_seen() -> None:
    """The third of eight rows that a thread copies takes the place of the fourth."""
    text = re.sub(r"(cp\.async\.ca\.shared\.global \[%r\d+)\+4096\]", r"\1+6144]", text_of(FAULTY))
    assert text != text_of(FAULTY)
    out, expected = run(FAULTY, 0, text)
    assert not torch.allclose(out.float(), expected.float(), atol=1, equal_nan=True)


def test_a_missing_fence_between_proxies_is_seen() -> None:
    text = re.sub(r"fence\.proxy\.async\.shared::cta;", "", text_of(FAULTY))
    with pytest.raises(AssertionError, match="no fence"):
        run(FAULTY, 0, text)


def test_a_slot_that_does_not_wait_for_its_rows_is_seen() -> None:
    """A barrier that counts TMA alone."""
    text, count = re.subn(r"(mov\.b32\s+%r\d+), 129;", r"\1, 1;", text_of(FAULTY))
    assert count == 1
    with pytest.raises(AssertionError):
        run(FAULTY, 0, text)
