"""The product of int8 weights and activations for sm_80, and the quantizer of x, executed on the CPU: their sources as C++, every thread of a
CTA a fiber (sm80_fibers.h). Sums are integers, so y is compared bit for bit.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from gristmill.kernels.linear.w8a8_sm80.shapes import SHAPES
from gristmill.quant.activations import quantize_activation
from tests import forked
from tests.native.test_sm80_fibers import ROOT, address, poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
NONE, NO_BARRIERS, EARLY_READS, HALVES = 0, 1, 4, 5
KEYS = [shape[:2] for shape in SHAPES]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("w8a8") / "w8a8.so"
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
    folders = [ROOT / "tests/native/on_cpu", ROOT / "kernels", ROOT / "kernels/_native"]
    include = [text for folder in folders for text in ("-I", str(folder))]
    subprocess.run(["g++", *flags, *include, ROOT / "tests/native/w8a8_fibers.cpp", "-o", out], check=True)
    return ctypes.CDLL(str(out))


def codes(low: int, rows: int, columns: int, seed: int) -> Tensor:
    """Uniform codes, 255 apart at most, and rows of the largest ones, whose sums are the largest."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(low, low + 256, (rows, columns), generator=generator, dtype=torch.int16)
    made[rows // 2] = low
    return made.to(torch.int8 if low < 0 else torch.uint8)


def wrong(
    library: ctypes.CDLL,
    m: int,
    n: int,
    k: int,
    key: tuple[int, ...],
    grid: int,
    *,
    share: int = 0,
    epilogue: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scales: torch.dtype = torch.float32,
    order: int = 0,
    fault: int = NONE,
) -> int:
    """How many numbers of y are not those of float64, rounded as the kernel says; -1 if threads wait for each other in vain."""
    mt, warps = key
    ldx = k + 16
    x, w = codes(-128, m, ldx, 1), codes(0, n, k, 2)
    generator = torch.Generator().manual_seed(3)
    x_scale, w_scale = torch.rand(m, generator=generator) + 0.5, torch.rand(n, generator=generator).to(scales)
    bias, residual = (torch.randn(*shape, generator=generator).to(dtype) * 1e4 for shape in ((n,), (m, n)))
    out, counters = poisoned(m, n).to(dtype), torch.zeros(4096, dtype=torch.int32)
    sums = torch.full((2 * grid * mt * warps * 32,), 1 << 30, dtype=torch.int32)
    types = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
    code = library.w8a8_on_cpu(
        *map(address, (w, x, out[1:], x_scale, w_scale)),
        *map(address, (bias, residual) if epilogue else (None, None)),
        *map(address, (counters, sums)),
        ctypes.c_int64(ldx),
        *(m, n, k, dtype == torch.float16, types[scales], mt, warps, grid, share, order, fault),
    )
    if code:
        return -1
    assert not counters.any(), "counters are zero after a call"
    assert out[0].isnan().all() and out[-1].isnan().all(), "written outside"
    exact = x[:, :k].double() @ (w.double() - 128).T  # integers below 2^53
    y = exact.float() * (x_scale[:, None] * w_scale.float())
    if epilogue:
        y = y + bias.float() + residual.float()
    return int((out[1:-1] != y.to(dtype)).sum())


@pytest.mark.parametrize(
    ("m", "n", "k", "key", "grid", "options"),
    [
        (1, 17, 16, (16, 4), 1, {}),
        (7, 257, 400, (16, 4), 3, {"epilogue": True, "dtype": torch.float16, "order": 1}),
        (5, 128, 1152, (16, 4), 4, {"share": 1, "order": 2}),  # one tile of y, which four CTAs share
        (33, 130, 272, (32, 4), 3, {"epilogue": True, "scales": torch.bfloat16}),
        (70, 300, 336, (64, 8), 3, {"share": 1, "scales": torch.float16, "order": 1}),
        (129, 264, 208, (128, 4), 4, {"share": 1, "epilogue": True, "order": 2}),
        (257, 13, 80, (128, 8), 2, {"share": 1, "dtype": torch.float16}),
    ],
)
def test_products_are_exact(
    library: ctypes.CDLL, m: int, n: int, k: int, key: tuple[int, int], grid: int, options: dict[str, int]
) -> None:
    assert wrong(library, m, n, k, key, grid, **options) == 0


def test_the_largest_sums_are_exact(library: ctypes.CDLL) -> None:
    """8,192 products of -128 and -128: 2^27, where neither bytes nor words of 16 bits hold a part."""
    assert wrong(library, 1, 1, 8192, (16, 4), 2, share=1) == 0


def test_every_shape_is_one_of_the_library(library: ctypes.CDLL) -> None:
    for key in KEYS:
        assert wrong(library, 3, 9, 32, key, 1) == 0
    assert wrong(library, 3, 9, 32, (48, 4), 1) == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "k"), [(1, 16), (3, 144), (2, 2880), (1, 8208 + 16)]
)  # the last: longer than what is kept
def test_rows_are_quantized_by_the_rules_bit_for_bit(
    library: ctypes.CDLL, m: int, k: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(k)
    wide = torch.randn(m, k + 8, generator=generator).to(dtype)
    wide[:, k:] = float("nan")
    x = wide[:, :k]
    x[0, :16] = torch.arange(16) / 8  # ties
    if m > 1:
        x[1] = 0
    if m > 2:
        x[2, 5] = float("nan")
    found, scales = torch.full((m, k), 77, dtype=torch.int8), torch.full((m,), -1.0)
    given = (*map(address, (wide, found, scales)), ctypes.c_int64(k + 8), m, k, dtype == torch.float16)
    assert library.quantize_on_cpu(*given, 2, NONE) == 0
    expected = quantize_activation(x, "int8_token")
    assert torch.equal(scales.isnan(), expected.scales[:, 0].isnan())
    whole = ~scales.isnan()
    assert torch.equal(scales[whole], expected.scales[whole, 0])
    assert torch.equal(found[whole], expected.values[whole])


def is_seen(library: ctypes.CDLL, fault: int) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_w8a8_fibers import wrong\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        "for order in range(3):\n"
        f"    if wrong(library, 17, 40, 1024, (16, 4), 2, share=1, order=order, fault={fault}):\n"
        "        sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


def test_a_planted_fault_is_seen(library: ctypes.CDLL) -> None:
    """Barriers that do nothing, slots that are read before their copies have landed, halves of a column of x swapped."""
    faults = (NONE, NO_BARRIERS, EARLY_READS, HALVES)
    assert [is_seen(library, fault) for fault in faults] == [False, True, True, True]
