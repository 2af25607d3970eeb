"""Experts of dense weights for Hopper executed on the CPU: kernels and their entry as C++, every thread of a CTA a fiber (wgmma_fibers.h).

Bits are not those of a GPU, whose tensor cores add in another order. What this cannot find beside: faults of the compiler, and races that need real
concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from gristmill.kernels.moe._clamped import ALPHA, clamped
from gristmill.kernels.moe.grouped_linear.dense_sm90 import shapes
from gristmill.kernels.moe.grouped_linear.dense_sm90.args import ARGS
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
SOURCE = ROOT / "tests/native/grouped_dense_fibers.cpp"
FOLDER = Path("moe/grouped_linear/dense_sm90")
FLAGS = ["-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init", "-fno-gnu-unique"]
LIMIT = 1.0
"""Of the clamped activation: many gates and ups are larger."""
SAMPLE = [shapes.SHAPES[number] for number in (0, 4, 7, 9)]
"""Shapes that `make test` runs in tests of less."""


def over(sample: bool) -> pytest.MarkDecorator:
    """Over all shapes, those that are not of the sample in `make test-full` alone if that is wanted."""
    every = [
        pytest.param(
            shape,
            id="x".join(map(str, shape[:5])),
            marks=[pytest.mark.slow] if sample and shape not in SAMPLE else [],
        )
        for shape in shapes.SHAPES
    ]
    return pytest.mark.parametrize("shape", every)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_library.load(tmp_path_factory.mktemp("grouped_dense") / "dense.so", SOURCE, flags=FLAGS)


def wrong(
    library: ctypes.CDLL,
    choice: shapes.Choice,
    counts: list[int],
    n: int,
    k: int,
    epilogue: str = "none",
    *,
    order: int = 0,
    grid: int = 3,
    early: bool = False,
) -> str | None:
    """What is wrong with y; None if every number is that of float64, rounded, and nothing else was written.

    Behind the rows of experts, and between rows of x, are NaN; the weights of experts without rows are NaN.
    """
    generator, rows, more = torch.Generator().manual_seed(n + k), sum(counts), 5
    flags = epilogue.split("+")
    silu_mul, clamp = "silu_mul" in flags, "clamp" in flags

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    w, bias = (draw(len(counts), n, k) / k**0.5).bfloat16(), draw(len(counts), n).bfloat16()
    w[torch.tensor(counts) == 0] = float("nan")
    wide = draw(rows + more, k + 8).bfloat16()
    wide[:, k:] = wide[rows:] = float("nan")
    x, offsets = wide[:, :k], torch.tensor([0, *counts]).cumsum(0).int()
    buffer = torch.full((rows + more + 2, n // 2 if silu_mul else n), float("nan")).bfloat16()
    args = ARGS.new(0, y=buffer[1:].data_ptr(), x=x.data_ptr(), ldx=x.stride(0), w=w.data_ptr())
    if "bias" in flags:
        args.bias = bias.data_ptr()
    args.offsets, args.experts, args.n, args.k = offsets.data_ptr(), len(counts), n, k
    args.rows = args.x_rows = rows + more
    args.silu_mul, args.clamp, args.alpha, args.limit = silu_mul, clamp, ALPHA, LIMIT
    args.early, args.clear = early, 1
    for field, value in shapes.config_of(choice, 132).items():
        setattr(args, field, value)
    args.grid = grid * choice.shape.cluster
    library.set_order(order)
    if code := library.grouped_dense_on_cpu(ctypes.byref(args)):
        return f"answer {code}"
    if not buffer[0].isnan().all() or not buffer[-1].isnan().all():
        return "written outside"
    y = buffer[1:-1].double()
    if not torch.equal(y[rows:], torch.zeros_like(y[rows:])):
        return "rows of no expert are not zero"
    for e, count in enumerate(counts):
        part = slice(int(offsets[e]), int(offsets[e]) + count)
        z = x[part].double() @ w[e].double().T
        z = z + bias[e].double() if "bias" in flags else z
        if silu_mul:
            gate, up = z.chunk(2, 1)
            z = clamped(z, ALPHA, LIMIT) if clamp else gate * gate.sigmoid() * up
        bad = ~((y[part] - z).abs() <= 2**-8 * z.abs() + 1e-5)
        if bad.any():
            return f"expert {e}: {int(bad.sum())} of {bad.numel()} numbers, the first at {bad.nonzero()[0].tolist()}"
    return None


def choices(shape: shapes.Shape) -> list[shapes.Choice]:
    return [choice for choice in shapes.choices(4096, 128) if choice.shape == shape]


@over(sample=False)
def test_every_choice_in_every_order(library: ctypes.CDLL, shape: shapes.Shape) -> None:
    """N and K that are no whole tiles and slots, experts with no rows, one, and more than a tile; CTAs with many tiles and with none."""
    counts = [3, 0, min(shape.mt + 5, 140), 1]
    for number, choice in enumerate(choices(shape)):
        for order in (0, 3, 5) if number == 0 else (1 + number % 2,):
            assert wrong(library, choice, counts, 200, 328, order=order, grid=2) is None, choice
            grid, early = (1, 3, 132)[(number + order) % 3], order % 2 == 1
            options = {"order": order, "grid": grid, "early": early}
            found = wrong(library, choice, [2, 9, 0, 20], 208, 264, "silu_mul", **options)
            assert found is None, (choice, options)


@over(sample=True)
@pytest.mark.parametrize("epilogue", ["bias", "bias+silu_mul", "clamp+silu_mul", "bias+clamp+silu_mul"])
def test_epilogues(library: ctypes.CDLL, shape: shapes.Shape, epilogue: str) -> None:
    for number, choice in enumerate(choices(shape)):
        assert wrong(library, choice, [7, 20], 336, 264, epilogue, order=number % 4) is None, choice


@over(sample=True)
def test_every_width(library: ctypes.CDLL, shape: shapes.Shape) -> None:
    """An expert that is just as wide, and one that is a row less."""
    counts = [count for width in shape.widths for count in (width, width - 1)]
    for epilogue in ("none", "silu_mul"):
        assert wrong(library, shapes.Choice(shape), counts, 48, 256, epilogue, order=1) is None


@over(sample=True)
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 1, 0], [8, 0, 0, 257]])
def test_few_rows_and_many(library: ctypes.CDLL, shape: shapes.Shape, counts: list[int]) -> None:
    for lag in (0, 1, shape.slots - 1):
        assert wrong(library, shapes.Choice(shape, lag=lag), counts, 16, 264, order=1) is None


@over(sample=True)
def test_many_slots(library: ctypes.CDLL, shape: shapes.Shape) -> None:
    """Rings that are filled many times, by one CTA."""
    for order in (1, 3):
        assert wrong(library, shapes.Choice(shape), [5, 3], 48, 1992, order=order, grid=1) is None


FAULTS = {
    "a slot is left before its products": ("wgmma_wait<1>()", "wgmma_wait<9>()"),
    "slices jump in the wrong round": ("first.advance(p.next_index, p.next_parity)", "first.advance(p.next_index)"),
    "a slot waits for other bytes": ("at.boxes * (S::kBox", "(at.boxes + 1) * (S::kBox"),
    "rows of the next expert are stored": ("m + row < out.end", "true"),
    "gate is taken for up": ("sums[b][i + 2]),", "sums[b][i]),"),
    "a bias of gate for up": ("p.gated ? h * p.out_n : 0", "0"),
    "the staging is one buffer": ("out.buffer = out.other, out.other = written;", "(void)written;"),
    "sums of slices are added once": ("for (int s = 1; s < S::kSlices; ++s)", "for (int s = 1; s < 2; ++s)"),
    "a slot is filled when one CTA has left it": ("mbar_arrive_at_rank(empty, lane)", "mbar_arrive(empty)"),
    "blocks of W are 64 rows": ("at.n + b * columns, at.expert", "at.n + b * 64, at.expert"),
}  # fmt: skip


QUICK = (
    "a slot is left before its products",
    "a slot waits for other bytes",
    "a slot is filled when one CTA has left it",
)
"""Those of `make test`."""


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    """Each in a copy of the source, by one of a few calls."""
    text = (ROOT / "kernels" / FOLDER / "product.cuh").read_text()
    right, changed = FAULTS[fault]
    assert text.count(right) >= 1
    copy = tmp_path / FOLDER
    copy.mkdir(parents=True)
    (copy / "product.cuh").write_text(text.replace(right, changed))
    for name in ("params.h", "args.h"):
        shutil.copy(ROOT / "kernels" / FOLDER / name, copy)
    entry = (ROOT / "kernels" / FOLDER / "entry.h").read_text()
    kept = [
        line
        for line in entry.splitlines()
        if not line.startswith("  K(") or any(f"  K({', '.join(map(str, one[:5]))}," in line for one in FEW)
    ]
    last = max(number for number, line in enumerate(kept) if line.startswith("  K("))
    kept[last] = kept[last].rstrip("\\ ")
    (copy / "entry.h").write_text("\n".join(kept) + "\n")
    out, folders = tmp_path / "dense.so", (tmp_path, *compiled_library.FOLDERS)
    compiled_library.make(out, SOURCE, flags=FLAGS, folders=folders)
    # What is wrong may write anywhere, so it is a process of its own.
    program = f"""
import ctypes, sys
from tests.native.test_grouped_dense_fibers import is_seen
sys.exit(0 if is_seen(ctypes.CDLL({str(out)!r})) else 3)
"""
    assert forked.run("-c", program, path=[ROOT]).returncode != 3


FEW = [shapes.SHAPES[0], shapes.SHAPES[2], shapes.SHAPES[9]]
"""Shapes that planted faults are compiled for."""


def is_seen(library: ctypes.CDLL) -> bool:
    """Whether one of a few calls is wrong."""
    return any(
        wrong(
            library, choice, [9, 3, 0, 34], n, 1032 if choice.shape.slices > 1 else 328, epilogue, order=order
        )
        for order in (1, 2, 5)
        for choice in (*(shapes.Choice(one) for one in FEW), shapes.Choice(FEW[1], 32))
        for n, epilogue in ((200, "none"), (208, "bias+silu_mul"))
    )


def test_nothing_is_seen_without_a_fault(library: ctypes.CDLL) -> None:
    assert not is_seen(library)
