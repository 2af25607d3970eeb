"""The schedules for sm_75 executed on the CPU: their source as C++ on the instructions that Turing has (sm75_fibers.h). The product of 16 k is
two of 8 k, copies go through registers: what test_sm80_fibers.py says of its tiles holds here, too.
"""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from tests import forked
from tests.native.test_sm80_fibers import (
    NO_BARRIERS,
    NONE,
    ROOT,
    address,
    built,
    error,
    gemm,
    grouped,
    inside,
    normal,
    poisoned,
    tiles_of,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
FP16 = torch.float16
LIMIT = 5e-4
"""fp16 has 11 bits."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built("sm75", tmp_path_factory.mktemp("sm75"))


@pytest.mark.parametrize(
    ("m", "n", "k", "mt", "grid", "share", "epilogue", "order"),
    [
        (1, 17, 40, 16, 1, 0, False, 0),
        (5, 40, 133, 16, 2, 0, False, 1),  # K ends within 16 bytes
        (33, 130, 264, 32, 3, 0, True, 1),
        (70, 200, 640, 64, 2, 1, True, 2),
        (16, 128, 1152, 16, 4, 1, False, 2),  # one tile of y, which four CTAs share
        pytest.param(130, 264, 384, 64, 3, 1, True, 0, marks=pytest.mark.slow),
    ],
)
def test_gemm(
    library: ctypes.CDLL, m: int, n: int, k: int, mt: int, grid: int, share: int, epilogue: bool, order: int
) -> None:
    assert gemm(library, m, n, k, mt, grid, share=share, epilogue=epilogue, order=order, dtype=FP16) < LIMIT


@pytest.mark.parametrize(
    ("counts", "n", "k", "mt", "grid", "options"),
    [
        ([3, 0, 40, 1, 17], 200, 264, 16, 5, {"top_k": 3, "bias": True}),
        ([3, 0, 40, 1, 17], 160, 136, 32, 4, {"top_k": 2, "gated": True, "order": 1}),
        ([0, 0, 70], 160, 136, 64, 3, {"gated": True, "clamp": True, "bias": True, "order": 2}),
        pytest.param([130, 0, 7], 130, 384, 64, 2, {"top_k": 1, "order": 1}, marks=pytest.mark.slow),
        ([1, 0, 2] * 15, 48, 72, 16, 7, {"top_k": 4, "bias": True}),  # more experts than lanes
    ],
)
def test_grouped(
    library: ctypes.CDLL, counts: list[int], n: int, k: int, mt: int, grid: int, options: dict[str, int]
) -> None:
    assert grouped(library, counts, n, k, mt, grid, dtype=FP16, **options) < LIMIT  # type: ignore[arg-type]


def decode(
    library: ctypes.CDLL,
    m: int,
    n: int,
    k: int,
    rt: int,
    wk: int,
    *,
    split: int = 1,
    ldx: int = 0,
    less: bool = False,
    epilogue: bool = False,
    order: int = 0,
    fault: int = NONE,
) -> float:
    """As `gemm`, of the schedule for few rows; `less`: of weights less 0.5."""
    ldx = ldx or k
    x, w = normal(m, ldx, seed=1, dtype=FP16), normal(n, k, seed=2, dtype=FP16)
    x[:, k:] = float("nan")
    bias, residual = normal(n, seed=3, dtype=FP16), normal(m, n, seed=4, dtype=FP16)
    scale = normal(n, seed=5).float()
    out, counters = poisoned(m, n, FP16), torch.zeros(4096, dtype=torch.int32)
    sums = torch.full((-(-n // 16) * rt * split * 512,), float("nan"))
    tiles, given = tiles_of(w), [bias, residual, scale] if epilogue else [None] * 3
    code = library.decode_on_cpu(
        *map(address, (tiles, x, out[1:], *given, counters, sums)),
        ctypes.c_int64(ldx),
        *(m, n, k, rt, wk, split, less, order, fault),
    )
    if code:
        return float("inf")
    assert not counters.any(), "counters are zero after a call"
    y = x[:, :k].double() @ (w.double() - 0.5 * less).T
    if epilogue:
        y = y * scale.double() + bias.double() + residual.double()
    return error(inside(out), y, k)


@pytest.mark.parametrize(
    ("m", "n", "k", "rt", "wk", "options"),
    [
        (1, 16, 128, 1, 8, {}),
        (8, 72, 1304, 2, 4, {"epilogue": True, "order": 1}),
        (5, 40, 264, 4, 4, {"ldx": 269, "order": 2}),  # rows that are not aligned
        (3, 56, 2056, 1, 8, {"split": 2, "epilogue": True, "order": 2}),
        (7, 90, 1160, 2, 4, {"split": 2, "less": True, "epilogue": True, "order": 1}),
        (8, 66, 256, 4, 4, {"less": True}),
        (2, 17, 130, 1, 8, {"ldx": 136}),  # K ends within 16 bytes
    ],
)
def test_decode(
    library: ctypes.CDLL, m: int, n: int, k: int, rt: int, wk: int, options: dict[str, int]
) -> None:
    assert decode(library, m, n, k, rt, wk, **options) < LIMIT  # type: ignore[arg-type]


def is_seen(library: ctypes.CDLL, fault: int, of: str) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_sm75_fibers import FP16, LIMIT, decode, gemm, grouped\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        "for order in range(3):\n"
        f"    if not {of} < LIMIT:\n"
        "        sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    return forked.run("-c", program.replace("FAULT", str(fault)), path=[ROOT]).returncode != 3


@pytest.mark.parametrize(
    "call",
    [
        "gemm(library, 17, 40, 384, 16, 1, order=order, fault=FAULT, dtype=FP16)",
        "grouped(library, [9, 20], 48, 384, 16, 2, order=order, fault=FAULT, dtype=FP16)",
        "decode(library, 8, 40, 1160, 1, 8, order=order, fault=FAULT)",
    ],
)
def test_a_planted_fault_is_seen(library: ctypes.CDLL, call: str) -> None:
    """Barriers that do nothing."""
    assert [is_seen(library, fault, call) for fault in (NONE, NO_BARRIERS)] == [False, True]
