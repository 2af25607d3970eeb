"""Products of 8-bit weights and activations for sm_80 and sm_89, and the quantizers of x, executed on the CPU: their sources as C++, every thread
of a CTA a fiber (sm80_fibers.h). y is compared bit for bit: with sums of integers, and with those of float32 in the order of the kernel.
"""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from torch import Tensor

from gristmill.kernels.linear.w8a8_sm80.shapes import (
    FP8,
    FP8_BLOCK,
    INT8,
    INT8_TURING,
    MAXIMA,
    Operands,
    pitch_of,
)
from gristmill.quant.activations import quantize_activation
from tests import forked
from tests.native import compiled_library
from tests.native.test_sm80_fibers import ROOT, address, poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
NONE, NO_BARRIERS, EARLY_READS, HALVES = 0, 1, 4, 5
KINDS = [INT8, FP8, FP8_BLOCK, INT8_TURING]
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
Partition = tuple[tuple[int, int], int, int]
"""Rows of x and warps of a CTA; CTAs; whether they share tiles of y."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("w8a8") / "w8a8.so"
    flags = ["-O2", "-ffp-contract=off", "-fno-strict-aliasing"]
    return compiled_library.load(out, ROOT / "tests/native/w8a8_fibers.cpp", flags=flags)


def codes(low: int, rows: int, columns: int, seed: int) -> Tensor:
    """Uniform codes, 255 apart at most, and rows of the largest ones, whose sums are the largest."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(low, low + 256, (rows, columns), generator=generator, dtype=torch.int16)
    made[rows // 2] = low
    return made.to(torch.int8 if low < 0 else torch.uint8)


def e4m3_codes(rows: int, columns: int, seed: int) -> Tensor:
    """Codes of very different sizes, and a row of the largest ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(rows, 1, generator=generator))
    made = torch.randn(rows, columns, generator=generator) * sizes
    made[rows // 2] = 448
    return made.clamp(-448, 448).to(torch.float8_e4m3fn)


def run(
    library: ctypes.CDLL,
    operands: Operands,
    partition: Partition,
    tensors: dict[str, Tensor | None],
    k: int,
    order: int = 0,
    fault: int = NONE,
) -> Tensor | None:
    """y [M, N] of x [M, K and more], w [N, K], their scales, and bias and residual; None if threads wait for each other in vain."""
    (mt, warps), grid, share = partition
    x, w, x_scale, w_scale, residual = (
        tensors[name] for name in ("x", "w", "x_scale", "w_scale", "residual")
    )
    assert x is not None and w is not None and x_scale is not None and w_scale is not None
    (m, ldx), n, dtype = x.shape, w.shape[0], tensors["like"].dtype  # type: ignore[union-attr]
    out, counters = poisoned(m, n).to(dtype), torch.zeros(4096, dtype=torch.int32)
    sums = torch.full((2 * grid * mt * warps * 32,), 1 << 30, dtype=torch.int32)
    code = library.w8a8_on_cpu(
        *map(address, (w, x, out[1:], x_scale, w_scale, tensors["bias"], residual, counters, sums)),
        address(tensors.get("row_block")),
        ctypes.c_int64(ldx),
        *(m, n, k, dtype == torch.float16, TYPES[w_scale.dtype], mt, warps, grid, share),
        *(KINDS.index(operands), int(x_scale.numel() > 1), pitch_of(m), order, fault),
    )
    if code:
        return None
    assert not counters.any(), "counters are zero after a call"
    assert out[0].isnan().all() and out[-1].isnan().all(), "written outside"
    return out[1:-1]


def epilogue_of(m: int, n: int, dtype: torch.dtype, wanted: bool) -> dict[str, Tensor | None]:
    """Bias and residual, large beside the product, and an empty tensor of the dtype of y."""
    generator = torch.Generator().manual_seed(3)
    bias, residual = (torch.randn(*shape, generator=generator).to(dtype) * 1e4 for shape in ((n,), (m, n)))
    like = torch.empty(0, dtype=dtype)
    return (
        {"bias": bias, "residual": residual, "like": like}
        if wanted
        else {"bias": None, "residual": None, "like": like}
    )


def finished(y: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
    """y in float32 with bias and residual, rounded."""
    for one in (tensors["bias"], tensors["residual"]):
        y = y if one is None else y + one.float()
    return y.to(tensors["like"].dtype)  # type: ignore[union-attr]


def wrong(
    library: ctypes.CDLL,
    m: int,
    n: int,
    k: int,
    key: tuple[int, int],
    grid: int,
    *,
    operands: Operands = INT8,
    share: int = 0,
    epilogue: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scales: torch.dtype = torch.float32,
    order: int = 0,
    fault: int = NONE,
) -> int:
    """How many numbers of y of int8 are not those of float64, rounded as the kernel says; -1 if threads wait for each other in vain."""
    x, w = codes(-128, m, k + 16, 1), codes(0, n, k, 2)
    generator = torch.Generator().manual_seed(4)
    x_scale, w_scale = torch.rand(m, generator=generator) + 0.5, torch.rand(n, generator=generator).to(scales)
    tensors = {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, **epilogue_of(m, n, dtype, epilogue)}
    out = run(library, operands, (key, grid, share), tensors, k, order, fault)
    if out is None:
        return -1
    exact = x[:, :k].double() @ (w.double() - 128).T  # integers below 2^53
    y = finished(exact.float() * (x_scale[:, None] * w_scale.float()), tensors)
    return int((out != y).sum())


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
        (1, 17, 16, (16, 4), 1, {"operands": INT8_TURING}),
        (5, 128, 1152, (16, 4), 4, {"operands": INT8_TURING, "share": 1, "order": 2}),
        (33, 257, 400, (32, 4), 3, {"operands": INT8_TURING, "epilogue": True, "dtype": torch.float16}),
        (70, 300, 336, (64, 4), 5, {"operands": INT8_TURING, "share": 1, "order": 1}),
        (129, 264, 208, (64, 8), 4, {"operands": INT8_TURING, "share": 1, "epilogue": True, "order": 2}),
    ],
)
def test_products_are_exact(
    library: ctypes.CDLL, m: int, n: int, k: int, key: tuple[int, int], grid: int, options: dict[str, int]
) -> None:
    assert wrong(library, m, n, k, key, grid, **options) == 0


def test_the_largest_sums_are_exact(library: ctypes.CDLL) -> None:
    """8,192 products of -128 and -128: 2^27, where neither bytes nor words of 16 bits hold a part."""
    assert wrong(library, 1, 1, 8192, (16, 4), 2, share=1) == 0


@pytest.mark.parametrize("operands", KINDS, ids=lambda operands: operands.format)
def test_every_shape_is_one_of_the_library(library: ctypes.CDLL, operands: Operands) -> None:
    for shape in operands.shapes:
        if operands in (INT8, INT8_TURING):
            assert wrong(library, 3, 9, 32, shape[:2], 1, operands=operands) == 0
        else:
            assert wrong_fp8(library, operands, 3, 9, 32, (shape[:2], 1, 0)) == 0
    assert wrong(library, 3, 9, 32, (48, 4), 1) == -1


def parts_of(operands: Operands, partition: Partition, m: int, n: int, k: int) -> dict[int, list[range]]:
    """The groups of columns, a slot each, of the parts of every tile of y, in the order in which they are added up."""
    (mt, warps), grid, share = partition
    (shape,) = (one for one in operands.shapes if one[:2] == (mt, warps))
    groups, tiles = -(-k // shape.columns), -(-m // mt) * -(-n // shape.rows)
    rest = tiles % grid
    whole = tiles - rest if share and rest * groups >= grid else tiles
    cuts = {(tiles - whole) * groups * cta // grid for cta in range(grid + 1)}
    parts = {tile: [range(groups)] for tile in range(whole)}
    for tile in range(tiles - whole):
        inside = {at - tile * groups for at in cuts if tile * groups < at < (tile + 1) * groups}
        ends = sorted(inside | {0, groups})
        parts[whole + tile] = [range(*pair) for pair in zip(ends, ends[1:], strict=False)]
    return parts


def product_of_e4m3(
    operands: Operands,
    partition: Partition,
    x: Tensor,
    w: Tensor,
    k: int,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The float32 sums [M, N] in the order of the kernel: 32 columns at a time from zero, a slot's sums times the scales of its block and of x's
    group, the slots of a part, the parts of a tile.

    Args:
        scales: of blocks: those of the rows of x [groups of 128, M] and of W [N, groups of 128]; else None.
    """
    (mt, warps), _, _ = partition
    (shape,) = (one for one in operands.shapes if one[:2] == (mt, warps))
    out, high = torch.full((x.shape[0], w.shape[0]), float("nan")), -(-x.shape[0] // mt)
    for tile, parts in parts_of(operands, partition, x.shape[0], w.shape[0], k).items():
        rows = slice(tile % high * mt, (tile % high + 1) * mt)
        columns = slice(tile // high * shape.rows, (tile // high + 1) * shape.rows)
        left, right = x[rows, :k].double(), w[columns].double()
        total = torch.zeros(left.shape[0], right.shape[0])
        for part in parts:
            added = torch.zeros_like(total)
            for group in part:
                slot = torch.zeros_like(total)
                for start in range(group * shape.columns, min(k, (group + 1) * shape.columns), 32):
                    step = slice(start, min(k, start + 32))
                    slot = (
                        slot.double() + left[:, step] @ right[:, step].T
                    ).float()  # exact before it is rounded
                if scales is None:
                    added = added + slot
                else:
                    block = group * shape.columns // 128
                    factor = scales[0][block, rows, None] * scales[1][columns, block]
                    added = (added.double() + slot.double() * factor.double()).float()
            total = total + added
        out[rows, columns] = total
    return out


def wrong_fp8(
    library: ctypes.CDLL,
    operands: Operands,
    m: int,
    n: int,
    k: int,
    partition: Partition,
    *,
    epilogue: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scales: torch.dtype = torch.float32,
    one_scale: bool = False,
    order: int = 0,
    fault: int = NONE,
) -> int:
    """How many numbers of y of e4m3 are not those of the sums in the kernel's order; -1 if threads wait for each other in vain.

    Without an epilogue y, rounded, is subtracted as the residual, so that the bits that rounding takes show as well.
    """
    x, w = e4m3_codes(m, k + 16, 1), e4m3_codes(n, k, 2)
    generator, blocks = torch.Generator().manual_seed(5), -(-k // 128)
    tensors: dict[str, Tensor | None] = {"x": x, "w": w, **epilogue_of(m, n, dtype, epilogue)}
    if operands.blocks:
        # Blocks of rows in any order, as fused and cut weights have them, and a number that is none of x's past the M of a group.
        row_block = torch.randint(0, 5, (n,), generator=generator, dtype=torch.int32)
        x_scale = torch.full((blocks, pitch_of(m)), float("nan"))
        x_scale[:, :m] = (torch.rand(blocks, m, generator=generator) + 0.5) / 2**14
        w_scale = (torch.rand(5, blocks, generator=generator) + 0.5).to(scales)
        tensors |= {"row_block": row_block, "x_scale": x_scale, "w_scale": w_scale}
        y = product_of_e4m3(operands, partition, x, w, k, (x_scale[:, :m], w_scale.float()[row_block.long()]))
    else:
        x_scale = (torch.rand(1 if one_scale else m, generator=generator) + 0.5) / 2**14
        w_scale = torch.rand(n, generator=generator).to(scales)
        tensors |= {"x_scale": x_scale, "w_scale": w_scale}
        y = product_of_e4m3(operands, partition, x, w, k, None) * (x_scale[:, None] * w_scale.float())
    if not epilogue:
        tensors["residual"] = -y.to(dtype)
    out = run(library, operands, partition, tensors, k, order, fault)
    return -1 if out is None else int((out != finished(y, tensors)).sum())


@pytest.mark.parametrize(
    ("operands", "m", "n", "k", "partition", "options"),
    [
        (FP8, 1, 17, 16, ((16, 4), 1, 0), {}),
        (FP8, 7, 257, 400, ((16, 4), 3, 0), {"epilogue": True, "dtype": torch.float16, "order": 1}),
        (FP8, 5, 128, 1152, ((16, 4), 4, 1), {"order": 2, "one_scale": True, "dtype": torch.float16}),
        (FP8, 33, 130, 272, ((32, 4), 3, 0), {"epilogue": True, "scales": torch.bfloat16}),
        (FP8, 70, 300, 336, ((64, 4), 5, 1), {"scales": torch.float16, "order": 1}),
        (FP8, 129, 264, 208, ((64, 8), 4, 1), {"epilogue": True, "order": 2}),
        (FP8_BLOCK, 1, 17, 16, ((16, 4), 1, 0), {}),
        (FP8_BLOCK, 7, 257, 400, ((16, 4), 3, 0), {"epilogue": True, "dtype": torch.float16, "order": 1}),
        (FP8_BLOCK, 5, 128, 1152, ((16, 4), 4, 1), {"order": 2, "dtype": torch.float16}),
        (FP8_BLOCK, 33, 130, 272, ((32, 4), 3, 0), {"epilogue": True, "scales": torch.bfloat16}),
        (FP8_BLOCK, 70, 300, 336, ((64, 4), 5, 1), {"scales": torch.float16, "order": 1}),
        (FP8_BLOCK, 129, 264, 592, ((64, 8), 4, 1), {"epilogue": True, "order": 2}),
    ],
)
def test_sums_of_e4m3_are_those_of_the_order(
    library: ctypes.CDLL,
    operands: Operands,
    m: int,
    n: int,
    k: int,
    partition: Partition,
    options: dict[str, int],
) -> None:
    assert wrong_fp8(library, operands, m, n, k, partition, **options) == 0


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 144), (2, 2880), (1, 8208 + 16)])
def test_rows_are_quantized_to_e4m3_by_the_rules_bit_for_bit(
    library: ctypes.CDLL, m: int, k: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(k)
    wide = torch.randn(m, k + 8, generator=generator).to(dtype)
    wide[:, k:] = float("nan")
    x = wide[:, :k]
    x[0, :16] = torch.arange(16) / 8 + 9  # ties: the largest number of the row is 10.875
    if m > 1:
        x[1, : k // 2] = 0
    for number, form in enumerate(("fp8_token", "fp8_g128", "fp8")):
        groups, pitch = -(-k // 128) if number == 1 else 1, pitch_of(m) if number == 1 else 1
        found = torch.full((m, k), 77, dtype=torch.uint8)
        scales = torch.full((groups * pitch if number == 1 else m,), -1.0)
        maxima, parts = torch.full((MAXIMA,), float("nan")), min(m, 2)
        given = (*map(address, (wide, found, scales, maxima)), ctypes.c_int64(k + 8), m, k, pitch, parts)
        assert library.quantize_fp8_on_cpu(*given, number, dtype == torch.float16, 2) == 0
        expected = quantize_activation(x, form)
        written = scales.view(groups, pitch)[:, :m].T if number == 1 else scales
        assert torch.equal(written.reshape(-1), expected.scales.reshape(-1).expand(written.numel())), form
        assert torch.equal(found, expected.values.view(torch.uint8)), form
    x[m - 1, 5] = float("nan")
    number, scales = 0, torch.full((m,), -1.0)
    given = (*map(address, (wide, found, scales, None)), ctypes.c_int64(k + 8), m, k, 0, 1)
    assert library.quantize_fp8_on_cpu(*given, number, dtype == torch.float16, 2) == 0
    assert scales[m - 1].isnan() and not scales[: m - 1].isnan().any()


def is_seen(library: ctypes.CDLL, call: str, fault: int) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from gristmill.kernels.linear.w8a8_sm80.shapes import FP8_BLOCK, INT8_TURING\n"
        "from tests.native.test_w8a8_fibers import wrong, wrong_fp8\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        "for order in range(3):\n"
        f"    if {call}, order=order, fault={fault}):\n"
        "        sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        ("wrong(library, 17, 40, 1024, (16, 4), 2, share=1", True),
        ("wrong(library, 17, 40, 1024, (16, 4), 2, operands=INT8_TURING, share=1", False),
        ("wrong_fp8(library, FP8_BLOCK, 17, 40, 1024, ((16, 4), 2, 1)", True),
    ],
)
def test_a_planted_fault_is_seen(library: ctypes.CDLL, call: str, copies: bool) -> None:
    """Barriers that do nothing, slots that are read before their copies have landed, if there are copies, operands of x swapped."""
    faults = (NONE, NO_BARRIERS, EARLY_READS, HALVES)
    assert [is_seen(library, call, fault) for fault in faults] == [False, True, copies, True]
