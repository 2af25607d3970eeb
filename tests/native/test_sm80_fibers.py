"""The schedules gemm and grouped for sm_80 executed on the CPU: their source as C++, every thread of a CTA a fiber (sm80_fibers.h).

Weights are bf16 as they are: the decoders of packed ones have tests of their own (tests/kernels/test_frag16_sm80_decoders.py). What this
cannot find: faults of the compiler, and races that need real concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.kernels.moe.grouped_linear.op import reference
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
FACTOR = 4
"""Of the stored weights; sm80_fibers.cpp and sm75_fibers.cpp have the same."""
NONE, NO_BARRIERS, _, _, EARLY_READS = range(5)


def built(name: str, folder: Path) -> ctypes.CDLL:
    """The library of `<name>_fibers.cpp`."""
    flags = ["-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init"]
    flags.append("-fno-gnu-unique")  # inline variables are each library's own
    return compiled_library.load(folder / f"{name}.so", ROOT / f"tests/native/{name}_fibers.cpp", flags=flags)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built("sm80", tmp_path_factory.mktemp("sm80"))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tiles_of(w: Tensor) -> Tensor:
    """[..., N, K] as tiles of 16 x 128, those of 64 rows together: [..., blocks of 64 rows][K / 128][tiles of the block]. NaN past N and K."""
    *experts, n, k = w.shape
    high, groups = -(-n // 16), -(-k // 128)
    whole = torch.full((*experts, high * 16, groups * 128), float("nan"), dtype=w.dtype)
    whole[..., :n, :k] = w * FACTOR
    whole[..., :n, k:] = 0  # x has zeros there, which NaN would not leave zero
    parts = whole.unflatten(-2, (high, 16)).unflatten(-1, (groups, 128)).transpose(-3, -2)
    blocks = [
        parts[..., at : at + 4, :, :, :].transpose(-4, -3).flatten(len(experts)) for at in range(0, high, 4)
    ]
    return torch.cat(blocks, -1).contiguous()


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Of its first element; null."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """NaN, with a row before and one after."""
    return torch.full((rows + 2, columns), float("nan"), dtype=dtype)


def inside(out: Tensor) -> Tensor:
    """What a kernel wrote; nothing around it may be written."""
    assert out[0].isnan().all() and out[-1].isnan().all(), "written outside"
    return out[1:-1]


def gemm(
    library: ctypes.CDLL,
    m: int,
    n: int,
    k: int,
    mt: int,
    grid: int,
    *,
    share: int = 0,
    epilogue: bool = False,
    order: int = 0,
    fault: int = NONE,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """The largest relative error of a product; infinite if threads wait for each other in vain."""
    ldx = -(-k // 8) * 8 + 8
    x, w = normal(m, ldx, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype)
    x[:, k:] = float("nan")  # past the end
    bias, residual = normal(n, seed=3, dtype=dtype), normal(m, n, seed=4, dtype=dtype)
    scale = normal(n, seed=5).float()
    out, counters = poisoned(m, n, dtype), torch.zeros(4096, dtype=torch.int32)
    sums = torch.full((2 * grid * mt * 512,), float("nan"))
    tiles = tiles_of(w)
    given = [bias, residual, scale] if epilogue else [None] * 3
    code = library.gemm_on_cpu(
        *map(address, (tiles, x, out[1:], *given, counters, sums)),
        ctypes.c_int64(ldx),
        *(m, n, k, mt, grid, share, order, fault),
    )
    if code:
        return float("inf")
    assert not counters.any(), "counters are zero after a call"
    y = x[:, :k].double() @ w.double().T
    if epilogue:
        y = y * scale.double() + bias.double() + residual.double()
    return error(inside(out), y, k)


def error(out: Tensor, y: Tensor, k: int) -> float:
    """The largest error beside the size of the sums; NaN counts as infinite."""
    return (
        float(((out.double() - y).abs() / (k**0.5 + y.abs())).nan_to_num(torch.inf).max())
        if y.numel()
        else 0.0
    )


LIMIT = 4e-3
"""bf16 has 8 bits."""


@pytest.mark.parametrize(
    ("m", "n", "k", "mt", "grid", "share", "epilogue", "order"),
    [
        (1, 17, 40, 16, 1, 0, False, 0),
        (33, 130, 264, 32, 3, 0, True, 1),
        (70, 200, 640, 64, 2, 1, True, 2),
        (16, 128, 1152, 16, 4, 1, False, 2),  # one tile of y, which four CTAs share
        pytest.param(130, 264, 384, 128, 3, 1, True, 0, marks=pytest.mark.slow),
    ],
)
def test_gemm(
    library: ctypes.CDLL, m: int, n: int, k: int, mt: int, grid: int, share: int, epilogue: bool, order: int
) -> None:
    assert gemm(library, m, n, k, mt, grid, share=share, epilogue=epilogue, order=order) < LIMIT


def grouped(
    library: ctypes.CDLL,
    counts: list[int],
    n: int,
    k: int,
    mt: int,
    grid: int,
    *,
    top_k: int = 0,
    gated: bool = False,
    clamp: bool = False,
    bias: bool = False,
    order: int = 0,
    fault: int = NONE,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """As `gemm`, of rows of experts: `top_k` gathers them, 0 = they are sorted. Two rows belong to no expert."""
    experts, rows, ldx = len(counts), sum(counts) + 2, k + 8
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    generator = torch.Generator().manual_seed(rows)
    places = torch.randperm(rows, generator=generator).int() if top_k else None
    x = normal(-(-rows // top_k) if top_k else rows, ldx, seed=1, dtype=dtype)
    w, scale = normal(experts, n, k, seed=2, dtype=dtype), torch.rand(experts, n, generator=generator) + 0.5
    biases = normal(experts, n, seed=3, dtype=dtype) if bias else None
    out, tiles = poisoned(rows, n // 2 if gated else n, dtype), tiles_of(w)
    code = library.grouped_on_cpu(
        *map(address, (tiles, x, out[1:], biases, scale, offsets, places)),
        ctypes.c_int64(ldx),
        *(rows, experts, n, k, top_k or 1, gated, clamp),
        *map(ctypes.c_float, (1.702, 7.0)),
        *(mt, grid, order, fault),
    )
    if code:
        return float("inf")
    scaled = w.float() * scale[..., None]
    y = reference(x[:, :k].float(), scaled, offsets, places, top_k or 1, gated, n, biases, clamp)
    found = inside(out)
    assert not found[int(offsets[-1]) :].any(), "rows of no expert are 0"
    return error(found, y, k if not gated or clamp else k * 4)


@pytest.mark.parametrize(
    ("counts", "n", "k", "mt", "grid", "options"),
    [
        ([1], 16, 8, 16, 1, {}),
        ([3, 0, 40, 1, 17], 200, 264, 16, 5, {"top_k": 3, "bias": True}),
        ([3, 0, 40, 1, 17], 160, 136, 32, 4, {"top_k": 2, "gated": True, "order": 1}),
        ([0, 0, 70], 160, 136, 64, 3, {"gated": True, "clamp": True, "bias": True, "order": 2}),
        pytest.param([130, 0, 7], 130, 384, 128, 2, {"top_k": 1, "order": 1}, marks=pytest.mark.slow),
        ([0, 0, 0], 64, 128, 32, 3, {"gated": True}),
        ([1, 0, 2] * 15, 48, 72, 16, 7, {"top_k": 4, "bias": True}),  # more experts than lanes
    ],
)
def test_grouped(
    library: ctypes.CDLL, counts: list[int], n: int, k: int, mt: int, grid: int, options: dict[str, int]
) -> None:
    assert grouped(library, counts, n, k, mt, grid, **options) < LIMIT  # type: ignore[arg-type]


def is_seen(library: ctypes.CDLL, fault: int) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_sm80_fibers import LIMIT, gemm, grouped\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        f"for order in range(3):\n"
        f"    one = gemm(library, 17, 40, 384, 16, 1, order=order, fault={fault})\n"
        f"    other = grouped(library, [9, 20], 48, 384, 16, 2, order=order, fault={fault})\n"
        "    if not (one < LIMIT and other < LIMIT):\n"
        "        sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


def test_a_planted_fault_is_seen(library: ctypes.CDLL) -> None:
    """Barriers that do nothing, and slots that are read before their copies have landed."""
    assert [is_seen(library, fault) for fault in (NONE, NO_BARRIERS, EARLY_READS)] == [False, True, True]
