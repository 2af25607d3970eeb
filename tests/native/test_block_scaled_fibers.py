"""Products of block-scaled codes for sm_120, and the quantizer of x, executed on the CPU: their sources as C++, every thread of a CTA a fiber
(sm80_fibers.h), the one instruction modelled. No GPU here has it, so its model is compared with layouts that CuTe has for it.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.block_scaled_sm120.shapes import SHAPES
from gristmill.quant import numeric
from gristmill.quant.activations import quantize_activation
from gristmill.quant.tensor import QuantTensor
from tests import forked
from tests.native import compiled_library
from tests.native.test_sm80_fibers import ROOT, address, poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
NONE, NO_BARRIERS, EARLY_READS, HALVES, OF_A, OF_B = 0, 1, 4, 5, 6, 7
FORMATS = ("nvfp4", "mxfp4", "mxfp8")
BY_BF16 = "-DGM_BLOCK_SCALE_BY_BF16"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """With the model of the instruction, and with what replaces it on other GPUs."""
    folder, source = tmp_path_factory.mktemp("block_scaled"), ROOT / "tests/native/block_scaled_fibers.cpp"
    flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing"]
    return {
        name: compiled_library.load(folder / f"{name}.so", source, flags=[*flags, *extra])
        for name, extra in (("model", ()), ("bf16", (BY_BF16,)))
    }


LAYOUTS = {
    # What CuTe DSL 4.8.1 prints as tv_layout_A, _B and _C of the atoms MmaMXF4NVF4Op, MmaMXF4Op and MmaMXF8Op: (lane, value) to
    # row + 16 k of A, column + 8 k of B, row + 16 column of C.
    4: (
        "((4,8),(8,2,2)):((128,1),(16,8,512))",
        "((4,8),(8,2)):((64,1),(8,256))",
        "((4,8),(2,2)):((32,1),(16,8))",
    ),
    8: (
        "((4,8),(4,2,2)):((64,1),(16,8,256))",
        "((4,8),(4,2)):((32,1),(8,128))",
        "((4,8),(2,2)):((32,1),(16,8))",
    ),
}
SCALE_LAYOUTS = ("(2,2,8):(8,0,1)", "(4,8):(0,1)")
"""Lane to row of A, and to column of B: SFALayout and SFBLayout of CUTLASS's mma_traits_sm120.hpp, without their mode of columns. Lanes in the
mode of stride 0 have the same scale there; PTX's thread-id says which of them the instruction reads."""


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def offsets(shape: list[int], strides: list[int]) -> NDArray[np.int64]:
    """The offset of every index of a layout, the first mode fastest."""
    found = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = (found[None, :] + stride * np.arange(size)[:, None]).reshape(-1)
    return found


def layout(text: str) -> NDArray[np.int64]:
    """[lanes, values] of the offsets of a CuTe layout ((lanes),(values)):((strides),(strides))."""
    lanes, values, of_lanes, of_values = (numbers(part) for part in re.findall(r"\(([\d,]+)\)", text))
    return offsets(lanes, of_lanes)[:, None] + offsets(values, of_values)[None, :]


def placed(layout_text: str, codes: NDArray[np.uint32], rows: int) -> NDArray[np.int64]:
    """[rows, k] of codes [lanes, values], whose place is row + rows * k."""
    places = layout(layout_text)
    matrix = np.full((rows, places.size // rows), -1, np.int64)
    matrix[places % rows, places // rows] = codes
    assert (matrix >= 0).all(), "every element is in one place"
    return matrix


def unpacked(registers: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """[lanes, values] of registers [lanes, words], low bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((registers[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(registers.shape[0], -1)


def values_of(format: str, codes: NDArray[np.int64]) -> NDArray[np.float64]:
    made = torch.from_numpy(codes).to(torch.uint8)
    decoded = numeric.e4m3_decode(made) if format == "mxfp8" else numeric.e2m1_decode(made)
    return decoded.double().numpy()


def scales_of(
    format: str, registers: NDArray[np.uint32], text: str, which: int, count: int, byte: int
) -> NDArray[np.float64]:
    """[rows, scales] that the instruction takes out of a register per lane."""
    shape, strides = (numbers(part) for part in text.split(":"))
    place = offsets(shape, strides)
    broadcast = strides.index(0)
    index = np.arange(32) // math.prod(shape[:broadcast]) % shape[broadcast]
    rows = np.full((place.max() + 1, count), -1, np.int64)
    lanes = np.flatnonzero(index == which)
    rows[place[lanes]] = unpacked(registers[:, None], 8)[lanes, byte : byte + count]
    assert (rows >= 0).all()
    made = torch.from_numpy(rows).to(torch.uint8)
    decoded = numeric.e4m3_decode(made) if format == "nvfp4" else numeric.e8m0_decode(made)
    return decoded.double().numpy()


def modelled(
    format: str, byte: int, of_a: int, of_b: int, registers: tuple[NDArray[np.uint32], ...]
) -> NDArray[np.float64]:
    """[32, 4] sums of one instruction by the layouts, from registers of a [32, 4], b [32, 2] and the scales of both [32]."""
    a, b, a_scales, b_scales = registers
    scheme = QuantScheme.parse(format)
    of_left, of_right, of_sums = LAYOUTS[scheme.bits]
    left = values_of(format, placed(of_left, unpacked(a, scheme.bits), 16))
    right = values_of(format, placed(of_right, unpacked(b, scheme.bits), 8))
    group = scheme.group_size or 1
    count = left.shape[1] // group
    left *= scales_of(format, a_scales, SCALE_LAYOUTS[0], of_a, count, byte).repeat(group, 1)
    right *= scales_of(format, b_scales, SCALE_LAYOUTS[1], of_b, count, byte).repeat(group, 1)
    sums = left @ right.T
    places = layout(of_sums)
    return sums[places % 16, places // 16]


SELECTORS = [("nvfp4", 0), ("mxfp4", 0), ("mxfp4", 2), *(("mxfp8", byte) for byte in range(4))]


@pytest.mark.parametrize("name", ["model", "bf16"])
@pytest.mark.parametrize(("format", "byte"), SELECTORS)
def test_the_instruction_takes_codes_and_scales_from_where_cute_has_them(
    libraries: dict[str, ctypes.CDLL], name: str, format: str, byte: int
) -> None:
    """All codes but NaN, scales that leave sums exact, all selectors of lanes."""
    generator = np.random.default_rng(7)
    for of_a in range(2):
        for of_b in range(4):
            a, b = (
                generator.integers(0, 1 << 32, (32, 4), np.uint32),
                generator.integers(0, 1 << 32, (32, 2), np.uint32),
            )
            if format == "mxfp8":  # from 1/8 to 1 7/8
                a, b = ((r & np.uint32(0x9F9F9F9F)) + np.uint32(0x20202020) for r in (a, b))
            low = np.uint32(0x30303030 if format == "nvfp4" else 0x7E7E7E7E)
            scales = [
                (generator.integers(0, 1 << 32, 32, np.uint32) & np.uint32(0x03030303)) + low for _ in "ab"
            ]
            d = generator.integers(-8, 8, (32, 4)).astype(np.float32)
            before = d.astype(np.float64)
            pointers = [t.ctypes.data_as(ctypes.c_void_p) for t in (a, b, *scales, d)]
            assert libraries[name].block_scale_on_cpu(FORMATS.index(format), byte, of_a, of_b, *pointers) == 0
            expected = before + modelled(format, byte, of_a, of_b, (a, b, *scales))
            assert np.array_equal(d, expected), (format, byte, of_a, of_b)


def codes_and_scales(format: str, rows: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Packed codes and scales whose products sum up exactly."""
    generator = torch.Generator().manual_seed(seed)
    scheme = QuantScheme.parse(format)
    codes = torch.randint(0, 256, (rows, k * scheme.bits // 8), generator=generator).to(torch.uint8)
    if format == "mxfp8":
        codes = (codes & 0x9F) + 0x20
    choices = {"nvfp4": [0x30, 0x38, 0x3C, 0x40]}.get(format, [126, 127, 128])
    chosen = torch.randint(0, len(choices), (rows, scheme.groups(k)), generator=generator)
    return codes, torch.tensor(choices, dtype=torch.uint8)[chosen]


def dequantized(format: str, codes: Tensor, scales: Tensor, k: int) -> Tensor:
    """[rows, k] in float64."""
    scheme = QuantScheme.parse(format)
    stored = scales.view(torch.float8_e4m3fn) if format == "nvfp4" else scales
    one = torch.ones(1) if scheme.has_global else None
    return QuantTensor(codes, stored, (codes.shape[0], k), scheme, global_scale=one).dequantize().double()


def wrong(
    library: ctypes.CDLL,
    format: str,
    m: int,
    n: int,
    k: int,
    key: tuple[int, ...],
    grid: int,
    *,
    share: int = 0,
    epilogue: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    order: int = 0,
    fault: int = NONE,
) -> int:
    """How many numbers of y are not those of float64, rounded as the kernel says; -1 if threads wait for each other in vain."""
    mt, warps = key
    (x, x_scale), (w, w_scale) = codes_and_scales(format, m, k, 1), codes_and_scales(format, n, k, 2)
    generator = torch.Generator().manual_seed(3)
    x_factor = w_factor = None
    if format == "nvfp4":
        x_factor, w_factor = (
            torch.rand(1, generator=generator) + 0.5,
            torch.rand(n, generator=generator) + 0.5,
        )
    bias, residual = (torch.randn(*shape, generator=generator).to(dtype) * 1e4 for shape in ((n,), (m, n)))
    out, counters = poisoned(m, n).to(dtype), torch.zeros(4096, dtype=torch.int32)
    sums = torch.full((2 * grid * mt * warps * 32,), float("nan"))
    code = library.block_scaled_on_cpu(
        FORMATS.index(format),
        *map(address, (w, x, out[1:], x_scale, w_scale, x_factor, w_factor)),
        *map(address, (bias, residual) if epilogue else (None, None)),
        *map(address, (counters, sums)),
        *(m, n, k, dtype == torch.float16, mt, warps, grid, share, order, fault),
    )
    if code:
        return -1
    assert not counters.any(), "counters are zero after a call"
    assert out[0].isnan().all() and out[-1].isnan().all(), "written outside"
    exact = dequantized(format, x, x_scale, k) @ dequantized(format, w, w_scale, k).T
    y = exact.float()
    assert torch.equal(y.double(), exact), "the test's own sums are exact in float32"
    if x_factor is not None and w_factor is not None:
        y = y * (x_factor * w_factor)
    if epilogue:
        y = y + bias.float() + residual.float()
    return int((out[1:-1] != y.to(dtype)).sum())


CASES = [
    ("nvfp4", 1, 17, 128, (16, 4), 1, {}),
    ("mxfp4", 1, 17, 256, (16, 4), 1, {"dtype": torch.float16}),
    ("mxfp8", 7, 257, 256, (16, 4), 3, {"epilogue": True, "dtype": torch.float16, "order": 1}),
    ("nvfp4", 7, 257, 384, (16, 4), 3, {"epilogue": True, "dtype": torch.float16, "order": 1}),
    ("mxfp4", 5, 128, 1152, (16, 4), 4, {"share": 1, "order": 2}),  # one tile of y, which four CTAs share
    ("mxfp8", 5, 128, 1152, (16, 4), 4, {"share": 1, "order": 2}),
    ("nvfp4", 33, 130, 256, (32, 4), 3, {"epilogue": True}),
    ("mxfp8", 33, 130, 256, (32, 4), 3, {"epilogue": True}),
    ("nvfp4", 70, 300, 256, (64, 4), 4, {"share": 1, "order": 1}),
    ("mxfp8", 70, 300, 256, (64, 8), 3, {"share": 1, "order": 1}),
    ("mxfp4", 129, 264, 256, (128, 8), 3, {"share": 1, "epilogue": True, "order": 2}),
    ("mxfp8", 129, 136, 256, (128, 4), 3, {"share": 1, "epilogue": True, "order": 2}),
]
Options = dict[str, int]


@pytest.mark.parametrize(("format", "m", "n", "k", "key", "grid", "options"), CASES)
def test_products_are_exact(
    libraries: dict[str, ctypes.CDLL],
    format: str,
    m: int,
    n: int,
    k: int,
    key: tuple[int, int],
    grid: int,
    options: Options,
) -> None:
    assert wrong(libraries["model"], format, m, n, k, key, grid, **options) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_products_by_other_instructions_are_the_same(libraries: dict[str, ctypes.CDLL], format: str) -> None:
    assert wrong(libraries["bf16"], format, 5, 40, 384, (16, 4), 2, share=1, epilogue=True) == 0


def test_every_shape_is_one_of_the_library(libraries: dict[str, ctypes.CDLL]) -> None:
    for format, shapes in SHAPES.items():
        for shape in shapes:
            assert wrong(libraries["model"], format, 3, 9, 128, shape[:2], 1) == 0
        assert wrong(libraries["model"], format, 3, 9, 128, (48, 4), 1) == -1


def numbers_of(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, with ties, zeros, the largest and the smallest numbers, in a wider tensor of NaN."""
    wide = torch.randn(m, k + 8, generator=torch.Generator().manual_seed(k)).to(dtype)
    x = wide[:, :k]
    x *= torch.logspace(-3, 3, m)[:, None].to(dtype)
    x[0, :32] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4
    )  # ties of e2m1 under a scale of 1
    x[0, 32:64] = torch.arange(32) / 16 + 16.5
    if m > 1:
        x[1, :128] = 0
    if m > 2:
        x[2, :32] = torch.finfo(dtype).smallest_normal / 4
        x[2, 32:64] = torch.finfo(dtype).max / 2
    wide[:, k:] = float("nan")
    return wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("m", "k", "parts"), [(1, 128, 1), (2, 640, 1), (5, 1152, 3)])
def test_rows_are_quantized_by_the_rules_bit_for_bit(
    libraries: dict[str, ctypes.CDLL], format: str, m: int, k: int, parts: int, dtype: torch.dtype
) -> None:
    wide = numbers_of(m, k, dtype)
    found, scales, factor = quantized(libraries["model"], format, wide, parts)
    expected = quantize_activation(wide[:, :k], format)
    assert torch.equal(scales, expected.scales.view(torch.uint8))
    assert torch.equal(found, expected.values.view(torch.uint8))
    if expected.global_scale is not None:
        assert torch.equal(factor, expected.global_scale)


def quantized(library: ctypes.CDLL, format: str, wide: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the factor of wide[:, :-8], with rows that are apart."""
    m, k, scheme = wide.shape[0], wide.shape[1] - 8, QuantScheme.parse(format)
    codes = torch.full((m, k * scheme.bits // 8), 77, dtype=torch.uint8)
    scales = torch.full((m, scheme.groups(k)), 77, dtype=torch.uint8)
    factor, maxima = torch.full((1,), -1.0), torch.full((256,), float("nan"))
    given = (*map(address, (wide, codes, scales, factor, maxima)), ctypes.c_int64(k + 8), m, k)
    half = wide.dtype == torch.float16
    assert library.quantize_on_cpu(FORMATS.index(format), *given, half, parts, 2, NONE) == 0
    return codes, scales, factor


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_remains_visible(
    libraries: dict[str, ctypes.CDLL], format: str, bad: float
) -> None:
    """In the scale of its group, or in the factor of all of x."""
    wide = numbers_of(2, 128, torch.bfloat16)
    wide[0, 40] = bad
    codes, scales, factor = quantized(libraries["model"], format, wide, 1)
    if format == "nvfp4":
        assert not factor.isfinite()
    else:
        assert scales.flatten().tolist().count(255) == 1 and scales[0, 1] == 255


def is_seen(library: ctypes.CDLL, format: str, fault: int) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_block_scaled_fibers import wrong\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        "for order in range(3):\n"
        f"    if wrong(library, {format!r}, 17, 40, 512, (16, 4), 2, share=1, order=order, fault={fault}):\n"
        "        sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_a_planted_fault_is_seen(libraries: dict[str, ctypes.CDLL], format: str) -> None:
    """Barriers that do nothing, slots that are read before their copies have landed, halves of a column of x swapped, scales of another tile."""
    faults = (NONE, NO_BARRIERS, EARLY_READS, HALVES, OF_A, OF_B)
    assert [is_seen(libraries["model"], format, fault) for fault in faults] == [False, *[True] * 5]
