"""The schedule gemm_ws of linear over frag16 tiles executed on the CPU: kernels, decoders and their entry as C++, every thread of a CTA a fiber
(wgmma_fibers.h).

Bits are not those of a GPU, whose tensor cores add in another order. What this cannot find beside: faults of the compiler, and races that need real
concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.linear.frag16_sm90.instances import formats, table
from gristmill.quant import pack, quantize
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
SOURCE = ROOT / "tests/native/gemm_ws_fibers.cpp"
FOLDER = Path("linear/frag16_sm90")
FLAGS = ["-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init", "-fno-gnu-unique"]
SCHEMES = {"int4_g128": "int4_g128", "mxfp4": "mxfp4", "int8": "int8_g128"}
"""What is stored in a format: plain scales in tiles, multipliers of rows, and eight bits."""


Library = Callable[[str, gemm_ws.Shape], ctypes.CDLL]


def shapes_of(name: str) -> tuple[gemm_ws.Shape, ...]:
    return gemm_ws.shapes_of(formats()[name])


def key_of(shape: gemm_ws.Shape) -> str:
    return "x".join(map(str, shape[:4]))


SHAPES = shapes_of("int4_g128")
SAMPLE = [
    shape
    for shape in SHAPES
    if key_of(shape) in ("32x2x1x2", "128x4x1x1", "64x1x4x1", "80x2x1x1", "192x1x2x1")
]
"""Shapes that `make test` runs: two accumulators, staggered halves, slices, five pairs of fragments, sums in the place of x."""


def definitions(name: str, shapes: tuple[gemm_ws.Shape, ...]) -> list[str]:
    """The macros that CMake would write into the source of a format, for bf16 and these shapes."""
    row = table()["formats"][name]
    variant = "bf16/bf16" if "bf16/bf16" in row["wgmma"] else "bf16/any"
    decoder = row["wgmma"][variant].replace("<T", "<__nv_bfloat16")
    instances = [
        f"K({key_of(shape)}, 2, {2 if variant == 'bf16/bf16' else 0}, __nv_bfloat16, gm::Decoder, {', '.join(map(str, shape))})"
        for shape in shapes
    ]
    return [
        f"-DGM_BITS={row['bits']}",
        f"-DGM_TILE_BYTES={row['tile_bytes']}",
        f"-DGM_FLAG_BYTES={gemm_ws.FLAG_BYTES}",
        f"-DGM_DECODERS=using Decoder = {decoder};",
        f"-DGM_INSTANCES(K)={' '.join(instances)}",
    ]


def build(out: Path, name: str, shapes: tuple[gemm_ws.Shape, ...], copy: Path | None = None) -> Path:
    """A library of the kernels of a format; `copy`: a folder with other versions of some sources."""
    folders = (*compiled_library.FOLDERS, ROOT / "kernels" / FOLDER)
    return compiled_library.make(
        out,
        SOURCE,
        flags=[*FLAGS, *definitions(name, shapes)],
        folders=folders if copy is None else (copy, *folders),
    )


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels of a format, by a shape that must be among them. Those of the sample are compiled apart."""

    @cache
    def of(name: str, sample: bool) -> ctypes.CDLL:
        shapes = tuple(shape for shape in shapes_of(name) if shape in SAMPLE or not sample)
        return ctypes.CDLL(str(build(tmp_path_factory.mktemp("gemm_ws") / f"{name}.so", name, shapes)))

    return lambda name, shape: of(name, shape in SAMPLE)


@cache
def weight(name: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W [N, K] as the kernel multiplies it, its tiles between NaN, its multipliers of rows."""
    generator = torch.Generator().manual_seed(n * 10000 + k)
    sizes = torch.exp(torch.randn(n, 1, generator=generator))
    q = quantize(torch.randn(n, k, generator=generator) * sizes / k**0.5, SCHEMES[name])
    tiles, row_scale, _ = pack(q, formats()[name].layout).tensors
    around = torch.full((tiles.numel() + 4096,), 255, dtype=torch.uint8)
    around[2048:-2048] = tiles
    return q.dequantize(torch.bfloat16).double(), around, row_scale


def wrong(
    library: ctypes.CDLL,
    name: str,
    shape: gemm_ws.Shape,
    partition: gemm_ws.Partition,
    m: int,
    n: int,
    k: int,
    epilogue: str = "none",
    *,
    order: int = 0,
    raster: int = 0,
    shift: int = 0,
) -> str | None:
    """What is wrong with y; None if every number is that of float64, rounded, and nothing else was written.

    Around the tiles of W, between rows of x and in scratch memory are NaN. shift: elements by which y is off 16 bytes.
    """
    generator, flags, form = torch.Generator().manual_seed(m), epilogue.split("+"), formats()[name]

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    w, tiles, row_scale = weight(name, n, k)
    wide, bias, residual = draw(m + 1, (k + 15) // 8 * 8), draw(n), draw(m, n)
    wide[:, k:] = wide[m:] = float("nan")
    x = wide[:m, :k]
    buffer = torch.full(((m + 2) * n + 8,), float("nan")).bfloat16()
    y = buffer[n + shift :][: m * n].view(m, n)
    config = gemm_ws.config_of(form, shape, partition, m, n, k)
    scratch = torch.full((gemm_ws.workspace_bytes(config),), 255, dtype=torch.uint8)
    scratch[: gemm_ws.FLAG_BYTES] = 0
    args = ARGS.new(0, y=y.data_ptr(), x=x.data_ptr(), ldx=x.stride(0), w=tiles[2048:].data_ptr())
    args.m, args.n, args.k, args.x_type, args.scale_type = m, n, k, 2, 2
    args.row_scale = row_scale.data_ptr() if row_scale.numel() else None
    args.bias = bias.data_ptr() if "bias" in flags else None
    args.residual = residual.data_ptr() if "residual" in flags else None
    args.scratch = scratch.data_ptr()
    for field, value in config.items():
        setattr(args, field, value)
    args.raster = raster or config["raster"]
    library.set_order(order)
    if code := library.gemm_ws_on_cpu(ctypes.byref(args)):
        return f"answer {code}"
    if scratch[: gemm_ws.FLAG_BYTES].any():
        return "flags are left"
    z = x.double() @ w.T
    if "bias" in flags:
        z = z + bias.double()
    if "residual" in flags:
        z = z + residual.double()
    before, after = buffer[: n + shift], buffer[n + shift + m * n :]
    if not before.isnan().all() or not after.isnan().all():
        return "written outside"
    bad = ~(
        (y.double() - z).abs()
        <= 2**-8 * z.abs() + 1e-5 * w.norm(dim=1) * x.double().norm(dim=1, keepdim=True)
    )
    return (
        f"{int(bad.sum())} of {bad.numel()} numbers, the first at {bad.nonzero()[0].tolist()}"
        if bad.any()
        else None
    )


def partitions_of(name: str, shape: gemm_ws.Shape, k: int, grid: int) -> list[gemm_ws.Partition]:
    """Every split along K, tiles dealt out along K in each way, and every lag of the second half."""
    made = [
        gemm_ws.Partition(split, 0, grid)
        for split in (1, 2, 4, 8)
        if gemm_ws.divides(split, shape) and -(-k // 128) // split >= shape.slices
    ]
    if shape.slices == 1:
        lags = (0, *gemm_ws.lags_of(formats()[name], shape))
        made += [gemm_ws.Partition(1, even, grid, lag) for even in (0, 1, 2) for lag in lags if even or lag]
    return made


over_shapes = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=key_of(shape), marks=[] if shape in SAMPLE else [pytest.mark.slow])
        for shape in SHAPES
    ],
)


@over_shapes
def test_every_partition(libraries: Library, shape: gemm_ws.Shape) -> None:
    """Of tiles of which the last are not whole, for CTAs of one to three tiles."""
    for number, partition in enumerate(partitions_of("int4_g128", shape, 1152, 3)):
        call = (shape, partition, shape.mt + 9, 200, 1152)
        assert wrong(libraries("int4_g128", shape), "int4_g128", *call, order=number % 6) is None, partition


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=key_of)
def test_every_partition_in_every_order(libraries: Library, shape: gemm_ws.Shape) -> None:
    for grid, m, n, k in ((3, shape.mt + 9, 200, 1152), (2, 65, 280, 640)):
        for partition in partitions_of("int4_g128", shape, k, grid):
            for order in range(6):
                found = wrong(
                    libraries("int4_g128", shape), "int4_g128", shape, partition, m, n, k, order=order
                )
                assert found is None, (partition, m, order)


@over_shapes
@pytest.mark.parametrize(
    "epilogue",
    [
        pytest.param("bias", marks=pytest.mark.slow),
        pytest.param("residual", marks=pytest.mark.slow),
        "bias+residual",
    ],
)
def test_epilogues(libraries: Library, shape: gemm_ws.Shape, epilogue: str) -> None:
    """Also of rows of y that are not 16-byte aligned."""
    for number, partition in enumerate(partitions_of("int4_g128", shape, 640, 3)):
        for n, shift in ((136, 0), (131, 0), (136, 3))[number % 3 :: 2]:
            call = (shape, partition, 70, n, 640, epilogue)
            found = wrong(libraries("int4_g128", shape), "int4_g128", *call, order=number % 6, shift=shift)
            assert found is None, (partition, n, shift)


@over_shapes
@pytest.mark.parametrize("m", [1, 7, 65, 257])
def test_rows(libraries: Library, shape: gemm_ws.Shape, m: int) -> None:
    for raster in (1, 2):
        for order in (1, 2):
            found = wrong(
                libraries("int4_g128", shape),
                "int4_g128",
                shape,
                gemm_ws.Partition(1, 0, 3),
                *(m, 72, 512, "bias"),
                order=order,
                raster=raster,
            )
            assert found is None, (raster, order)


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("int8", marks=pytest.mark.slow)])
def test_other_formats(libraries: Library, name: str) -> None:
    """Rows with multipliers, columns past the last tile, and slots of eight bits."""
    k = 928 if name == "mxfp4" else 896
    for shape in SAMPLE:
        for number, partition in enumerate(partitions_of(name, shape, k, 2)[::3]):
            call = (shape, partition, 40, 200, k, "bias+residual")
            assert wrong(libraries(name, shape), name, *call, order=number % 6) is None, (shape, partition)


def test_many_slots(libraries: Library) -> None:
    """Rings that are filled many times, by one CTA."""
    for number, shape in enumerate(SAMPLE):
        call = (shape, gemm_ws.Partition(1, 0, 1), 33, 136, 4096)
        assert wrong(libraries("int4_g128", shape), "int4_g128", *call, order=number % 2 * 2 + 1) is None, (
            shape
        )


FAULTS = {
    "a slot is left before its products": ("wgmma_wait<PENDING>();  //", "wgmma_wait<9>();  //"),
    "a slot of weights is left before it is read": ("if (s == 0) {", "if (s == 7) {"),
    "sums are read before the last products": ("wgmma_wait<0>();\n      release(last_x);", "release(last_x);"),
    "weights of the next group": ("from += k * (4 * kTile);", "from += (k + 1) * (4 * kTile);"),
    "a short block counts as a whole one": ("mbar_arrive_expect_tx(w.full, here * kTile)", "mbar_arrive_expect_tx(w.full, kWSlot)"),
    "sums of slices are added once": ("if (o != slice) ld_shared", "if (o > slice) ld_shared"),
    "slices do not wait for each other": ("bar_sync(1, kThreads);\n#pragma unroll\n        for (int f = 0; f < kF", "for (int f = 0; f < kF"),
    "parts of other tiles are added": ("for (int part = first; part < first + count", "for (int part = first; part <= first + count"),
    "flags are left": ("if (there) *flag = 0;", ""),
    "a cluster does not wait for its sums": ("        cluster_sync();\n#pragma unroll 1", "#pragma unroll 1"),
    "a share of a cluster goes to another": ("st_cluster(mapa(to, owner)", "st_cluster(mapa(to, owner ^ 1)"),
    "the second half does not wait": ("int slots = min(p.lag, groups) * 2 - 1", "int slots = min(p.lag, groups) * 2 + 9"),
    "bias of row g + 8 of row g": ("if (row + 8 < p.n) bias[1]", "if (row + 8 < p.n) bias[0]"),
    "rows past the last are stored": ("n < p.n ? m_end - m : 0", "n < p.n ? 16 * PAIRS : 0"),
    "the halves of rows are not swapped back": ("((lane & 1) ^ (lane >> 3 & 1)) << 4", "(lane & 1) << 4"),
}  # fmt: skip
QUICK = ("parts of other tiles are added",)
"""Those of `make test`."""
SOURCES = ("gemm_ws.cuh", "gemm_ws_tiles.cuh", "entry.h")


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    """Each in a copy of the sources, by one of a few calls."""
    right, changed = FAULTS[fault]
    texts = {name: (ROOT / "kernels" / FOLDER / name).read_text() for name in SOURCES}
    assert sum(text.count(right) for text in texts.values()) == 1
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(right, changed))
    out = build(tmp_path / "fault.so", "int4_g128", tuple(FEW), tmp_path)
    # What is wrong may write anywhere, so it is a process of its own.
    program = f"""
import ctypes, sys
from tests.native.test_gemm_ws_fibers import is_seen
sys.exit(0 if is_seen(ctypes.CDLL({str(out)!r})) else 3)
"""
    assert forked.run("-c", program, path=[ROOT]).returncode != 3


FEW = [shape for shape in SAMPLE if key_of(shape) != "32x2x1x2"]
"""Shapes that planted faults are compiled for."""


def is_seen(library: ctypes.CDLL, orders: tuple[int, ...] = (1, 2, 5)) -> bool:
    """Whether one of a few calls is wrong."""
    return any(
        wrong(library, "int4_g128", shape, partition, 65, n, 1152, epilogue, order=order)
        for order in orders
        for shape in FEW
        for partition in partitions_of("int4_g128", shape, 1152, 3)
        for n, epilogue in ((200, "none"), (264, "bias+residual"))
        if partition.split < 8
    )


@pytest.mark.parametrize(
    "order", [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_nothing_is_seen_without_a_fault(libraries: Library, order: int) -> None:
    assert not is_seen(libraries("int4_g128", FEW[0]), (order,))
