"""Dense products of a few dozen rows for Hopper executed on the CPU: kernels and their entry as C++, every thread a fiber (wgmma_fibers.h).

Bits are not those of a GPU, whose tensor cores add in another order. What this cannot find beside: faults of the compiler, and races that need real
concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from gristmill.kernels.linear.dense_mid_sm90 import spec
from gristmill.kernels.linear.dense_mid_sm90.args import ARGS
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
SOURCE = ROOT / "tests/native/linear_dense_mid_fibers.cpp"
FOLDER = Path("linear/dense_mid_sm90")
FLAGS = ["-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init", "-fno-gnu-unique"]
ORDERS = range(8)
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TYPES = {torch.float16: 1, torch.bfloat16: 2}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_library.load(tmp_path_factory.mktemp("dense_mid") / "dense.so", SOURCE, flags=FLAGS)


def wrong(
    library: ctypes.CDLL,
    m: int,
    n: int,
    k: int,
    epilogue: str = "none",
    *,
    rows: int = 64,
    split: int = 1,
    ctas: int = 1,
    order: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shift: int = 0,
) -> str | None:
    """What is wrong with y; None if every number is that of float64, rounded, and nothing else was written.

    Between rows of x, and around y and the operands of the epilogue, are NaN. shift: of y, bias and residual from aligned memory, in elements.
    """
    generator, flags = torch.Generator().manual_seed(n + k), epilogue.split("+")
    gated = "silu_mul" in flags

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    def shifted(t: torch.Tensor) -> torch.Tensor:
        around = torch.full((t.numel() + 16 + shift,), float("nan"), dtype=dtype)
        there = around[8 + shift : 8 + shift + t.numel()].view(t.shape)
        there.copy_(t)
        return there

    wide = torch.full((m + 1, k + 8), float("nan"), dtype=dtype)
    wide[:m, :k] = draw(m, k)
    x, w, width = wide[:m, :k], (draw(n, k) / k**0.5).to(dtype), n // 2 if gated else n
    bias, residual = shifted(draw(n)), shifted(draw(m, width))
    buffer = torch.full((m * width + 16 + shift,), float("nan"), dtype=dtype)
    y = buffer[8 + shift : 8 + shift + m * width].view(m, width)
    args = ARGS.new(0, y=y.data_ptr(), x=x.data_ptr(), ldx=x.stride(0), w=w.data_ptr())
    if "bias" in flags:
        args.bias = bias.data_ptr()
    if "residual" in flags:
        args.residual = residual.data_ptr()
    args.m, args.n, args.k, args.type, args.silu_mul = m, n, k, TYPES[dtype], gated
    args.rows, args.split, args.ctas = rows, split, ctas
    library.set_order(order)
    if code := library.gm_dense_mid_sm90(ctypes.byref(args)):
        return f"answer {code}"
    if not buffer[: 8 + shift].isnan().all() or not buffer[8 + shift + m * width :].isnan().all():
        return "written outside"
    z = x.double() @ w.double().T
    z = z + bias.double() if "bias" in flags else z
    if gated:
        gate, up = z.chunk(2, 1)
        z = gate * gate.sigmoid() * up
    z = z + residual.double() if "residual" in flags else z
    bad = ~((y.double() - z).abs() <= STEP[dtype] * z.abs() + 2e-5)
    return (
        f"{int(bad.sum())} of {bad.numel()} numbers, the first at {bad.nonzero()[0].tolist()}"
        if bad.any()
        else None
    )


INSTANCES = [(rows, split) for rows in spec.ROWS for split in spec.SPLITS]


@pytest.mark.parametrize(("rows", "split"), INSTANCES)
def test_every_configuration(library: ctypes.CDLL, rows: int, split: int) -> None:
    """N and K that are no whole tiles and slots, odd N, more CTAs of a cluster than slots."""
    for place, ctas in enumerate(range(1, spec.CTAS[rows] + 1)):
        order = (split + 3 * place) % 8
        options = {"rows": rows, "split": split, "ctas": ctas, "order": order}
        m, n, k = ((33, 100, 328), (7, 77, 136), (64, 60, 200), (20, 9, 72))[place]
        assert wrong(library, m, n, k, **options) is None, options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 7, 16, 17, 32, 33, 64, 65, 128])
def test_every_width(library: ctypes.CDLL, m: int, dtype: torch.dtype) -> None:
    for rows, split, n in ((64, 2, 70), (128, 1, 20)):
        options = {"rows": rows, "split": split, "order": m % 8, "dtype": dtype}
        assert wrong(library, m, n, 136, **options) is None, options


@pytest.mark.parametrize(
    "epilogue", ["bias", "residual", "silu_mul", "bias+silu_mul", "bias+silu_mul+residual"]
)
def test_epilogues(library: ctypes.CDLL, epilogue: str) -> None:
    """Halves of gate and up that fill no tile, are odd, or are not aligned."""
    for place, (rows, split) in enumerate(((64, 1), (64, 3), (128, 2), (192, 1), (256, 4))):
        for n, shift in ((200, 0), (208, 1), (90, 0)):
            options = {"rows": rows, "split": split, "order": place, "shift": shift}
            assert wrong(library, 19, n, 72, epilogue, **options) is None, (n, options)


@pytest.mark.parametrize("order", ORDERS)
def test_rings_that_are_filled_many_times(library: ctypes.CDLL, order: int) -> None:
    """Copies and products early and late, clusters and warps that lag."""
    for rows, split, ctas in ((64, 1, 4), (128, 2, 3)):
        options = {"rows": rows, "split": split, "ctas": ctas, "order": order}
        assert wrong(library, 40, 70, 1096, **options) is None, options


def answer(library: ctypes.CDLL, **changed: int) -> int:
    """The entry's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    valid = {"m": 40, "n": 256, "k": 1024, "ldx": 1024, "type": 2, "rows": 128, "split": 1, "ctas": 2}
    return library.gm_dense_mid_sm90(ctypes.byref(ARGS.new(**(valid | {"device": -1} | changed))))


def test_rings_are_as_long_as_python_says(library: ctypes.CDLL) -> None:
    for rows, m in product(spec.ROWS, (1, 16, 17, 64, 65, 128)):
        for ctas in range(1, spec.CTAS[rows] + 1):
            width, slots = spec.width_of(m), spec.slots(m, rows, ctas)
            size = 1024 + max(slots * (rows + width) * 128, width * (rows + 4) * 4)
            assert slots >= 2 and answer(library, rows=rows, m=m, ctas=ctas) == size, (rows, m, ctas)
            assert (size + 1024) * ctas <= spec.PROCESSOR_KB * 1024, "they share a multiprocessor"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, None),
        ({"m": 0}, None),
        ({"m": 129}, -2),
        ({"m": -1}, -2),
        ({"n": 0}, -2),
        ({"n": 255, "silu_mul": 1}, -2),
        ({"k": 1020}, -2),
        ({"k": 0}, -2),
        ({"ldx": 1016}, -2),
        ({"ldx": 1028}, -2),
        ({"x": 8}, -2),
        ({"w": 8}, -2),
        ({"y": 2}, None),
        ({"type": 3}, -1),
        ({"type": 0}, -1),
        ({"rows": 96}, -5),
        ({"split": 0}, -5),
        ({"split": 9}, -5),
        ({"ctas": 0}, -5),
        ({"ctas": 5}, -5),
        ({"rows": 256, "ctas": 4}, -5),
    ],
)
def test_entry_refuses(library: ctypes.CDLL, changed: dict[str, int], code: int | None) -> None:
    found = answer(library, **changed)
    assert found > 0 if code is None else found == code


FAULTS = {
    "a slot is left before its products": ("wgmma_wait<1>()", "wgmma_wait<9>()"),
    "a slot waits for half of its bytes": ("place.full(base), S::kSlot)", "place.full(base), S::kSlot / 2)"),
    "a slot is filled before it is left": ("place.parity ^ 1", "place.parity"),
    "the ring is overwritten by sums": ("  bar_sync(kDone, S::kConsumers);  // nobody reads the ring", ""),
    "a cluster's sums are read too early": ("    cluster_sync();\n    finish", "    cluster_arrive();\n    finish"),
    "sums of one CTA only": ("for (int r = 1; r < kMostSplit; ++r)", "for (int r = 1; r < 1; ++r)"),
    "sums of its own CTA": ("mapa(staged + at, r)", "staged + at"),
    "gate is taken for up": ("m * S::kPitch + columns + q", "m * S::kPitch + q"),
    "a bias of gate for up": ("bias(n + p.out_n, count)", "bias(n, count)"),
    "numbers past the end are stored": ("if (i < count) to[i]", "to[i]"),
    "slices overlap": ("const int first = p.steps * rank / p.split", "const int first = p.steps * (rank ? rank - 1 : 0) / p.split"),
    "all warpgroups multiply the same rows": ("warpgroup * (kBlockRows * kStep * 2)", "0"),
    "rows r and r + 8 change places": ("S::kPitch + row + 8] = sums[i + j + 2]", "S::kPitch + row + 8] = sums[i + j]"),
}  # fmt: skip
QUICK = ("a slot is left before its products", "a cluster's sums are read too early")
"""Those of `make test`."""


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    """Each in a copy of the source, by one of a few calls."""
    text = (ROOT / "kernels" / FOLDER / "product.cuh").read_text()
    right, changed = FAULTS[fault]
    assert text.count(right) == 1
    copy = tmp_path / FOLDER
    copy.mkdir(parents=True)
    (copy / "product.cuh").write_text(text.replace(right, changed))
    for name in ("params.h", "args.h", "_linear_dense_mid_sm90.cu"):
        shutil.copy(ROOT / "kernels" / FOLDER / name, copy)
    out, folders = tmp_path / "dense.so", (tmp_path, *compiled_library.FOLDERS)
    compiled_library.make(out, SOURCE, flags=FLAGS, folders=folders)
    # What is wrong may write anywhere, so it is a process of its own.
    program = f"""
import ctypes, sys
from tests.native.test_linear_dense_mid_fibers import is_seen
sys.exit(0 if is_seen(ctypes.CDLL({str(out)!r})) else 3)
"""
    assert forked.run("-c", program, path=[ROOT]).returncode != 3


def is_seen(library: ctypes.CDLL) -> bool:
    """Whether one of a few calls is wrong."""
    return any(
        wrong(
            library, 40, n, 1160, epilogue, rows=rows, split=split, ctas=4 if rows == 64 else 3, order=order
        )
        for order in (1, 2, 5, 6)
        for rows, split in ((64, 1), (128, 3))
        for n, epilogue in ((98, "none"), (208, "bias+silu_mul"))
    )


def test_nothing_is_seen_without_a_fault(library: ctypes.CDLL) -> None:
    assert not is_seen(library)
