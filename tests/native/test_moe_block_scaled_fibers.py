"""Products of experts of block-scaled codes for sm_120, and the quantizer with a factor for each row, executed on the CPU as in
test_block_scaled_fibers.py, which compares the model of the instruction with CuTe's layouts.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_sm120 import _launch as linear_launch
from gristmill.kernels.linear.block_scaled_sm120.shapes import SHAPES
from gristmill.kernels.moe._clamped import clamped
from gristmill.kernels.moe.combine import torch as combine_torch
from gristmill.kernels.moe.combine import triton as combine_triton
from gristmill.kernels.moe.moe._activated import activated
from gristmill.kernels.moe.moe.block_scaled_sm120 import _launch, spec
from gristmill.kernels.moe.permute import torch as permute_torch
from gristmill.kernels.moe.permute import triton as permute_triton
from gristmill.quant.activations import quantize_activation
from tests import forked
from tests.native import compiled_library
from tests.native.test_block_scaled_fibers import (
    BY_BF16,
    EARLY_READS,
    FORMATS,
    HALVES,
    NO_BARRIERS,
    NONE,
    OF_A,
    OF_B,
    codes_and_scales,
    dequantized,
    numbers_of,
)
from tests.native.test_sm80_fibers import ROOT, address, poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
OP = default_registry().op("moe")
ALPHA, LIMIT = 1.702, 7.0


def built(folder: Path, *extra: str) -> ctypes.CDLL:
    """The library of moe_block_scaled_fibers.cpp."""
    flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", *extra]
    source = ROOT / "tests/native/moe_block_scaled_fibers.cpp"
    return compiled_library.load(folder / "moe.so", source, flags=flags)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("model"))


def experts_of(format: str, counts: list[int], n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of [experts, n, k]."""
    codes, scales = codes_and_scales(format, len(counts) * n, k, seed)
    return codes.view(len(counts), n, -1), scales.view(len(counts), n, -1)


def wrong(
    library: ctypes.CDLL,
    format: str,
    counts: list[int],
    n: int,
    k: int,
    key: tuple[int, ...],
    grid: int,
    *,
    top_k: int = 0,
    gated: bool = False,
    clamp: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    order: int = 0,
    fault: int = NONE,
) -> int:
    """How many numbers of y are not those of float64, rounded as the kernel says; -1 if threads wait for each other in vain.

    Two rows belong to no expert. `top_k` gathers rows of x, 0 = they are sorted. Gated values may be off by a rounding, as exp may be.
    """
    mt, warps = key
    experts, rows = len(counts), sum(counts) + 2
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    generator = torch.Generator().manual_seed(rows)
    places = torch.randperm(rows, generator=generator).int() if top_k else None
    given = -(-rows // top_k) if top_k else rows
    (x, x_scale), (w, w_scale) = (
        codes_and_scales(format, given, k, 1),
        experts_of(format, counts, n, k, 2),
    )
    x_factor = w_factor = None
    if format == "nvfp4":
        x_factor = torch.rand(given, generator=generator) + 0.5
        w_factor = torch.rand(experts, n, generator=generator) + 0.5
    if gated:  # values around 1
        x_factor = torch.rand(given, generator=generator) / k
    biases = torch.randn(experts, n, generator=generator).to(dtype) if bias else None
    columns = n // 2 if gated else n
    out = poisoned(rows, columns).to(dtype)
    code = library.grouped_block_scaled_on_cpu(
        FORMATS.index(format),
        *map(address, (w, x, out[1:], x_scale, w_scale, x_factor, w_factor, biases, offsets, places)),
        *(experts, n, k, top_k or 1, gated, clamp),
        *map(ctypes.c_float, (ALPHA, LIMIT)),
        *(dtype == torch.float16, mt, warps, grid, order, fault),
    )
    if code:
        return -1
    found, last, count = out[1:-1], int(offsets[-1]), 0
    assert out[0].isnan().all() and out[-1].isnan().all(), "written outside"
    assert found[last:].isnan().all(), "rows of no expert are not written"
    source = places.long() // top_k if places is not None else torch.arange(rows)
    values = dequantized(format, x, x_scale, k)
    for e in range(experts):
        part = slice(int(offsets[e]), int(offsets[e + 1]))
        exact = values[source[part]] @ dequantized(format, w[e], w_scale[e], k).T
        y = exact.float()
        assert torch.equal(y.double(), exact), "the test's own sums are exact in float32"
        of_x = torch.ones(given) if x_factor is None else x_factor
        of_w = torch.ones(n) if w_factor is None else w_factor[e]
        y = y * (of_x[source[part], None] * of_w)
        if biases is not None:
            y = y + biases[e].float()
        if not gated:
            count += int((found[part] != y.to(dtype)).sum())
            continue
        z = clamped(y, ALPHA, LIMIT) if clamp else activated(y, "silu", True)
        step = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
        count += int((~((found[part].float() - z).abs() <= z.abs() * step + 1e-6)).sum())
    return count


CASES = [
    ("nvfp4", [1], 16, 128, (16, 4), 1, {}),
    ("nvfp4", [3, 0, 40, 1, 17], 200, 384, (16, 4), 5, {"top_k": 3, "bias": True, "order": 1}),
    ("mxfp4", [3, 0, 40, 1, 17], 160, 256, (32, 4), 4, {"top_k": 2, "gated": True, "order": 2}),
    ("mxfp8", [3, 0, 17, 1, 9], 168, 256, (16, 4), 4, {"top_k": 2, "dtype": torch.float16}),
    ("mxfp8", [0, 0, 40], 320, 128, (32, 4), 3, {"gated": True, "clamp": True, "bias": True}),
    ("nvfp4", [0, 70, 0], 352, 128, (64, 4), 2, {"gated": True, "bias": True, "dtype": torch.float16}),
    ("mxfp8", [5, 66], 96, 256, (64, 8), 2, {"gated": True, "top_k": 1, "order": 1}),
    ("mxfp4", [130, 0, 7], 264, 256, (128, 8), 2, {"top_k": 1, "bias": True, "order": 2}),
    ("mxfp8", [130, 3], 192, 128, (128, 4), 2, {"gated": True, "order": 2}),
    ("mxfp4", [0, 0, 0], 64, 128, (32, 4), 3, {"gated": True}),
    ("nvfp4", [1, 0, 2] * 15, 48, 128, (16, 4), 7, {"top_k": 4, "bias": True}),  # more experts than lanes
]


@pytest.mark.parametrize(("format", "counts", "n", "k", "key", "grid", "options"), CASES)
def test_products_of_experts(
    library: ctypes.CDLL,
    format: str,
    counts: list[int],
    n: int,
    k: int,
    key: tuple[int, int],
    grid: int,
    options: dict[str, int],
) -> None:
    assert wrong(library, format, counts, n, k, key, grid, **options) == 0  # type: ignore[arg-type]


@pytest.mark.slow
def test_products_by_other_instructions_are_the_same(tmp_path: Path) -> None:
    other = built(tmp_path, BY_BF16)
    for format in FORMATS:
        assert wrong(other, format, [3, 0, 20], 64, 256, (16, 4), 2, top_k=2, bias=True) == 0


def test_every_shape_is_one_of_the_library(library: ctypes.CDLL) -> None:
    for format, shapes in SHAPES.items():
        for shape in shapes:
            assert wrong(library, format, [2, 1], 8, 128, shape[:2], 1) == 0
        assert wrong(library, format, [2, 1], 8, 128, (48, 4), 1) == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 128), (5, 2176)])
def test_each_row_has_the_factor_of_its_own_magnitudes_bit_for_bit(
    library: ctypes.CDLL, m: int, k: int, dtype: torch.dtype
) -> None:
    wide = numbers_of(m, k, dtype)
    codes = torch.full((m, k // 2), 77, dtype=torch.uint8)
    scales, factors = torch.full((m, k // 16), 77, dtype=torch.uint8), torch.full((m, 1), -1.0)
    given = map(address, (wide, codes, scales, factors))
    half = dtype == torch.float16
    assert library.quantize_rows_on_cpu(*given, ctypes.c_int64(k + 8), m, k, half, 2, NONE) == 0
    expected = quantize_activation(wide[:, :k], "nvfp4", by_row=True)
    assert expected.global_scale is not None and torch.equal(factors, expected.global_scale)
    assert torch.equal(scales, expected.scales.view(torch.uint8))
    assert torch.equal(codes, expected.values)
    for row in range(m):
        alone = quantize_activation(wide[row, :k], "nvfp4")
        assert torch.equal(codes[row], alone.values) and torch.equal(factors[row], alone.global_scale)  # type: ignore[arg-type]


class Entries:
    """The library's entries, carried out by fibers on tensors of a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def entry(self, name: str, struct: object, arch: str) -> Callable[[Any], int]:
        form = name.split("_")[2]
        return self.quantize if form == "blocks" else lambda args: self.product(FORMATS.index(form), args)

    def product(self, format: int, a: Any) -> int:
        addresses = (a.w, a.x, a.y, a.x_scale, a.w_scale, a.x_factor, a.w_factor, a.bias, a.offsets)
        pointers = [ctypes.c_void_p(address) for address in (*addresses, a.permutation)]
        numbers = (a.experts, a.n, a.k, a.top_k, a.silu_mul, a.clamp)
        limits = ctypes.c_float(a.alpha), ctypes.c_float(a.limit)
        shape = a.y_type == 1, a.mt, a.warps, min(a.grid, 3), 1, NONE
        result: int = self.library.grouped_block_scaled_on_cpu(format, *pointers, *numbers, *limits, *shape)
        return result

    def quantize(self, a: Any) -> int:
        given = [ctypes.c_void_p(address) for address in (a.x, a.codes, a.scales, a.factor)]
        sizes = ctypes.c_int64(a.ldx), a.m, a.k, a.x_type == 1
        if a.by_row:
            result: int = self.library.quantize_rows_on_cpu(*given, *sizes, 1, NONE)
        else:
            result = self.library.quantize_blocks_on_cpu(a.format, *given[:3], *sizes, 1, NONE)
        return result


@pytest.mark.parametrize(
    "problem",
    [
        "m=5,top_k=2,e=3,h=128,i=128,w=nvfp4.nvfp4",
        "m=5,top_k=2,e=3,h=128,i=128,x=fp16,w=mxfp8.mxfp8,epilogue=w13_bias+w2_bias+clamp",
        pytest.param("m=17,top_k=2,e=2,h=128,i=256,w=mxfp4.mxfp4,epilogue=w2_bias", marks=pytest.mark.slow),
    ],
)
def test_whole_calls_are_those_of_the_reference(
    library: ctypes.CDLL, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchers too: what they pass to the entries, over one workspace. Permute and combine are torch's here."""
    entries, stream = Entries(library), SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(_launch, "ptx_entry", entries.entry)
    monkeypatch.setattr(linear_launch, "ptx_entry", entries.entry)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(permute_triton, "launch", permute_torch.launch)
    monkeypatch.setattr(combine_triton, "launch", combine_torch.launch)
    given = OP.problem(problem)
    (kernel,) = (one for one in spec.KERNELS if not one.accepts(given))
    for config in list(kernel.space(given, Target.parse("sm_120")))[:2]:  # type: ignore[misc]
        outcome = verify(OP, kernel, config, given, "cpu")
        assert outcome.ok, (config, outcome.reason)


def is_seen(library: ctypes.CDLL, format: str, fault: int) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_moe_block_scaled_fibers import wrong\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        "for order in range(3):\n"
        f"    if wrong(library, {format!r}, [9, 20], 40, 512, (16, 4), 2, top_k=2, order=order, fault={fault}):\n"
        "        sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


@pytest.mark.parametrize("format", ["nvfp4", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_a_planted_fault_is_seen(library: ctypes.CDLL, format: str) -> None:
    """Barriers that do nothing, slots that are read before their copies have landed, halves of a column of x swapped, scales of another tile."""
    faults = (NONE, NO_BARRIERS, EARLY_READS, HALVES, OF_A, OF_B)
    assert [is_seen(library, format, fault) for fault in faults] == [False, *[True] * 5]
