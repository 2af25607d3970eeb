"""The program of block-scaled products for data-centre Blackwell computes what it should: its PTX, executed on a CPU (`block_scaled_machine`)."""

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
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_cutedsl import spec
from gristmill.kernels.linear.block_scaled_cutedsl._product_sm100 import product
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS
from gristmill.kernels.linear.op import gated
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from gristmill.quant.layouts._scales128x4 import tiled
from tests.integrations.cutedsl.block_scaled_machine import BlockScaledCta, Codes, Scales
from tests.integrations.cutedsl.ptx_machine import Map, execute
from tests.integrations.cutedsl.ptx_text import ptx_of
from tests.integrations.cutedsl.test_linear_sm100_ptx import EVERYTHING, Memory

B200 = Target.parse("sm_100")


class Case(NamedTuple):
    """A product, its tile and what follows it; ctas: that share the tiles."""

    scheme: str
    bn: int
    m: int
    n: int
    k: int
    epilogue: str = "none"
    x: str = "bf16"
    ctas: int = 2


@cache
def ptx(scheme: str, bn: int, epilogue: str, x: str) -> str:
    """The PTX of a configuration."""
    config = spec._config(scheme, bn, epilogue, x, 148, B200)
    return ptx_of(product(config), "sm_100a")


def operand(
    codes: Tensor, scales: Tensor, kind: str, rows: int, columns: int, group: int, spread: bool
) -> list[bytes | Map]:
    """Tensor maps of codes [rows, bytes] and of tiles of scales, of boxes of so many rows and columns, and what a program is given beside them."""
    bits = 4 if kind == "e2m1" else 8
    tiles = scales.numpy().view(np.uint16)
    sizes = struct.pack("<ii", codes.shape[0], codes.shape[1] * 8 // bits)
    of_tiles = struct.pack("<ii", tiles.shape[0], tiles.shape[1])
    return [
        Codes(codes.numpy(), (rows, columns * bits // 8), 128, bits, spread),
        sizes,
        Scales(tiles, (columns // group // 4, 256), 0),
        of_tiles,
    ]


def run(case: Case, seed: int, text: str = "") -> tuple[Tensor, Tensor]:
    """What the program computes, and what it should."""
    scheme, form, flags = QuantScheme.parse(case.scheme), FORMS[case.scheme], case.epilogue.split("+")
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if case.x == "bf16" else torch.float16
    columns = case.n // 2 if "silu_mul" in flags else case.n
    x = torch.randn(case.m, case.k, generator=generator).to(dtype)
    w = quantize(torch.randn(case.n, case.k, generator=generator), scheme.without_activation)
    given = quantize_activation(x, str(scheme.activation))
    slots = pack(w, "scales128x4_v1").slots
    x_scales = tiled(given.scales.view(torch.uint8))
    memory = Memory()
    factor = torch.ones(1) if given.global_scale is None else given.global_scale
    factors = slots["row_scale"] if scheme.has_global else factor
    bias = torch.randn(case.n, generator=generator).to(dtype)
    residual = torch.randn(case.m, columns, generator=generator).to(dtype)
    packed, out = memory.matrix(torch.zeros(case.m, columns, dtype=dtype).fill_(float("nan")))
    parameters: list[bytes | Map] = [bytes(16)] * 3
    parameters += operand(
        given.values.view(torch.uint8), x_scales, form.x, 128, form.columns, form.group, False
    )
    parameters += operand(
        slots["codes"], slots["scales"], form.w, min(case.bn, 128), form.columns, form.group, form.mixed
    )
    parameters += [memory.matrix(one)[0] for one in (factor, factors, bias, residual)]
    parameters += [packed, struct.pack("<i", -(-case.k // form.columns))]
    text = text or ptx(case.scheme, case.bn, case.epilogue, case.x)
    execute(text, parameters, memory.bytes, case.ctas, seed, BlockScaledCta)
    z = given.dequantize() @ w.dequantize().T
    z = z + bias.float() if "bias" in flags else z
    z = gated(z) if "silu_mul" in flags else z
    expected = z + residual.float() if "residual" in flags else z
    return torch.from_numpy(out.copy().view(np.int16)).view(dtype), expected.to(dtype)


CASES = [
    Case("nvfp4.nvfp4", 64, 150, 200, 544),
    Case("nvfp4.nvfp4", 256, 130, 512, 288, EVERYTHING),
    Case("nvfp4.nvfp4", 256, 257, 392, 544, "bias", "fp16", 1),
    Case("mxfp4.mxfp4", 128, 5, 264, 608, "residual", ctas=1),
    Case("mxfp8.mxfp8", 256, 130, 776, 160, ctas=1),
    Case("mxfp4.mxfp8", 128, 131, 136, 384, "bias"),
    Case("mxfp4.mxfp8", 64, 3, 328, 256, ctas=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_the_program_computes_what_it_should(case: Case) -> None:
    out, expected = run(case, seed=CASES.index(case))
    torch.testing.assert_close(out, expected, rtol=2**-7 if case.x == "bf16" else 2**-10, atol=2e-2)


def test_a_missing_copy_of_scales_is_seen() -> None:
    case = CASES[0]
    text = ptx(case.scheme, case.bn, case.epilogue, case.x)
    out, expected = run(case, 0, re.sub(r"tcgen05\.cp[^;]*;", "", text, count=1))
    assert not torch.allclose(out.float(), expected.float(), atol=1, equal_nan=True)
