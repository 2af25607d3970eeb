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
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.kernels.linear.frag16_sm90 import _launch_gemm_ws, gemm_ws
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.linear.frag16_sm90.instances import formats, limits, table
from gristmill.kernels.linear.op import gated, gated_error
from gristmill.quant import pack, quantize
from tests import forked
from tests.calls import make_call
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
    if key_of(shape) in ("32x2x1x2", "128x4x1x1", "64x1x4x1", "80x2x1x1", "192x1x2x1", "128x3x1x1")
]
"""Shapes that `make test` runs: two accumulators, staggered halves, slices, five pairs of fragments, sums in the place of x."""


PAIR = [shape for shape in SAMPLE if key_of(shape) in ("64x1x4x1", "80x2x1x1")]
"""Of those, the ones that other formats than int4_g128 run."""


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
        f"-DGM_CTA_BYTES={limits()['cta_bytes']}",
        f"-DGM_RESERVED_BYTES={limits()['reserved_bytes']}",
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
    """The kernels of a format, by a shape that must be among them. Those of the sample are compiled apart, of other formats two."""

    @cache
    def of(name: str, sample: bool) -> ctypes.CDLL:
        among = SAMPLE if name == "int4_g128" else PAIR
        shapes = tuple(shape for shape in shapes_of(name) if shape in among or not sample)
        return ctypes.CDLL(str(build(tmp_path_factory.mktemp("gemm_ws") / f"{name}.so", name, shapes)))

    return lambda name, shape: of(name, shape in (SAMPLE if name == "int4_g128" else PAIR))


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


def answer(
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
    size: float = 1.0,
) -> tuple[str | None, torch.Tensor]:
    """What is wrong with y, and y: None if every number is that of float64, rounded, and nothing else was written.

    Around the tiles of W, between rows of x and in scratch memory are NaN. shift: elements by which y is off 16 bytes. size: of x.
    """
    generator, flags, form = torch.Generator().manual_seed(n), epilogue.split("+"), formats()[name]

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    w, tiles, row_scale = weight(name, n, k)
    columns = n // 2 if "silu_mul" in flags else n
    # Rows are the same for every m.
    wide, bias, residual = draw(512, (k + 15) // 8 * 8)[: m + 1] * size, draw(n), draw(512, columns)[:m]
    wide[:, k:] = wide[m:] = float("nan")
    x = wide[:m, :k]
    buffer = torch.full(((m + 2) * columns + 8,), float("nan")).bfloat16()
    y = buffer[columns + shift :][: m * columns].view(m, columns)
    config = gemm_ws.config_of(form, shape, partition, m, n, k)
    scratch = torch.full((gemm_ws.workspace_bytes(config),), 255, dtype=torch.uint8)
    scratch[: gemm_ws.FLAG_BYTES] = 0
    args = ARGS.new(0, y=y.data_ptr(), x=x.data_ptr(), ldx=x.stride(0), w=tiles[2048:].data_ptr())
    args.m, args.n, args.k, args.x_type, args.scale_type = m, n, k, 2, 2
    args.row_scale = row_scale.data_ptr() if row_scale.numel() else None
    args.bias = bias.data_ptr() if "bias" in flags else None
    args.residual = residual.data_ptr() if "residual" in flags else None
    args.scratch, args.gated = scratch.data_ptr(), "silu_mul" in flags
    for field, value in config.items():
        setattr(args, field, value)
    args.raster = raster or config["raster"]
    library.set_order(order)
    if code := library.gemm_ws_on_cpu(ctypes.byref(args)):
        return f"answer {code}", y
    if scratch[: gemm_ws.FLAG_BYTES].any():
        return "flags are left", y
    z, sizes = x.double() @ w.T, w.norm(dim=1) * x.double().norm(dim=1, keepdim=True)
    if "bias" in flags:
        z = z + bias.double()
    if "silu_mul" in flags:
        z, sizes = gated(z), gated_error(z, sizes)
    if "residual" in flags:
        z = z + residual.double()
    before, after = buffer[: columns + shift], buffer[columns + shift + m * columns :]
    if not before.isnan().all() or not after.isnan().all():
        return "written outside", y
    bad = ~((y.double() - z).abs() <= 2**-8 * z.abs() + 1e-5 * sizes)
    wrong = f"{int(bad.sum())} of {bad.numel()} numbers, the first at {bad.nonzero()[:1].tolist()}"
    return (wrong if bad.any() else None), y


def wrong(*arguments: Any, **named: Any) -> str | None:
    """What is wrong, as `answer` says."""
    return answer(*arguments, **named)[0]


def partitions_of(
    name: str, shape: gemm_ws.Shape, k: int, grid: int, most: int = 4
) -> list[gemm_ws.Partition]:
    """Every split along K of up to `most`, tiles dealt out along K in each way, and every lag of the second half."""
    made = [
        gemm_ws.Partition(split, 0, grid)
        for split in (1, 2, 4, 8)
        if split <= most and gemm_ws.divides(split, shape) and -(-k // 128) // split >= shape.slices
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
        assert wrong(libraries("int4_g128", shape), "int4_g128", *call, order=number % 8) is None, partition


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=key_of)
def test_every_partition_in_every_order(libraries: Library, shape: gemm_ws.Shape) -> None:
    for grid, m, n, k in ((3, shape.mt + 9, 200, 1152), (2, 65, 280, 640)):
        for partition in partitions_of("int4_g128", shape, k, grid, 8):
            for order in range(8):
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
    for shape in PAIR:
        for number, partition in enumerate(partitions_of(name, shape, k, 2)[::3]):
            call = (shape, partition, 40, 200, k, "bias+residual")
            assert wrong(libraries(name, shape), name, *call, order=number % 8) is None, (shape, partition)


def test_many_slots(libraries: Library) -> None:
    """Rings that are filled many times, by one CTA."""
    for number, shape in enumerate(SAMPLE):
        call = (shape, gemm_ws.Partition(1, 0, 1), 33, 136, 4096)
        assert wrong(libraries("int4_g128", shape), "int4_g128", *call, order=number % 2 * 2 + 1) is None, (
            shape
        )


@over_shapes
def test_gate_and_up(libraries: Library, shape: gemm_ws.Shape) -> None:
    """With blocks of gate and of up that begin within those of W and that do not, and tiles that have less of them."""
    for number, partition in enumerate(partitions_of("int4_g128", shape, 1152, 3)):
        n, epilogue = ((320, "silu_mul"), (512, "bias+silu_mul+residual"))[number % 2]
        call = (shape, partition, shape.mt + 9, n, 1152, epilogue)
        assert wrong(libraries("int4_g128", shape), "int4_g128", *call, order=number % 8) is None, partition


@pytest.mark.slow
@pytest.mark.parametrize("n", [64, 128, 320, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=key_of)
def test_gate_and_up_in_every_order(libraries: Library, shape: gemm_ws.Shape, n: int) -> None:
    for partition in partitions_of("int4_g128", shape, 1152, 3, 8):
        for order in range(8):
            for epilogue, shift in (("silu_mul", 3), ("bias+silu_mul+residual", 0)):
                call = (shape, partition, shape.mt + 9, n, 1152, epilogue)
                found = wrong(libraries("int4_g128", shape), "int4_g128", *call, order=order, shift=shift)
                assert found is None, (partition, order, epilogue)


@over_shapes
@pytest.mark.parametrize("n", [64, 192])
def test_rows_of_gate_and_up(libraries: Library, shape: gemm_ws.Shape, n: int) -> None:
    """A row of y does not depend on the others, bit for bit. n: one and three blocks of 32 rows of gate."""
    first = None
    for number, m in enumerate((1, 7, 65, 257)):
        call = (shape, gemm_ws.Partition(1, 0, 3), m, n, 512, "bias+silu_mul")
        library = libraries("int4_g128", shape)
        found, y = answer(library, "int4_g128", *call, order=number, shift=number % 2)
        assert found is None, m
        assert first is None or torch.equal(y[:1], first), m
        first = y[:1]


def test_large_gates(libraries: Library) -> None:
    """Sigmoids of nearly 0 and of 1, whose reciprocals do not overflow."""
    for shape in SAMPLE[:2]:
        call = (shape, gemm_ws.Partition(1, 0, 3), 40, 128, 256, "silu_mul")
        assert wrong(libraries("int4_g128", shape), "int4_g128", *call, size=100.0) is None, shape


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("int8", marks=pytest.mark.slow)])
def test_gate_and_up_of_other_formats(libraries: Library, name: str) -> None:
    k = 928 if name == "mxfp4" else 896
    for number, shape in enumerate(PAIR):
        call = (shape, gemm_ws.Partition(1, 0, 2), 40, 320 + number % 2 * 64, k, "bias+silu_mul")
        assert wrong(libraries(name, shape), name, *call, order=number) is None, shape


def test_launches_with_gate_and_up(libraries: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors on a CPU: in the kernel where it can, without memory for gate and up, and otherwise in a launch of its own."""
    given: list[tuple[int, int]] = []

    def entry(args: Any) -> int:
        args.device = 0
        given.append((args.gated, args.y))
        return int(libraries("int4_g128", SAMPLE[0]).gemm_ws_on_cpu(ctypes.byref(args)))

    monkeypatch.setattr(_launch_gemm_ws, "cuda_entry", lambda name, struct: entry)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    form, partition = formats()["int4_g128"], gemm_ws.Partition(1, 1, 3)
    for n in (64, 320, 96):
        config = gemm_ws.config_of(form, SAMPLE[0], partition, 40, n, 256)
        config = {"format": form.name, "tile_bytes": form.tile_bytes, **config}
        q = quantize(torch.randn(n, 256), "int4_g128")
        x, bias, residual = torch.randn(40, 256), torch.randn(n), torch.randn(40, n // 2)
        values, out = [t.bfloat16() for t in (x, bias, residual)], torch.empty(40, n // 2).bfloat16()
        tensors = pack(q, form.layout).tensors
        call = make_call("linear", values[0], tensors, *values[1:], True, n, None, out)
        _launch_gemm_ws.launch(config, call)
        assert given.pop() == (1, out.data_ptr()) if gemm_ws.gates(n) else given.pop()[0] == 0
        z = values[0].float() @ q.dequantize(torch.bfloat16).float().T + values[1].float()
        expected = gated(z) + values[2].float()
        assert torch.allclose(out.float(), expected, rtol=2**-6, atol=2**-4), n


def test_gate_and_up_of_half_a_block_are_refused(libraries: Library) -> None:
    call = (SAMPLE[0], gemm_ws.Partition(1, 0, 3), 7, 96, 256, "silu_mul")
    assert wrong(libraries("int4_g128", SAMPLE[0]), "int4_g128", *call) == "answer -2"
    assert not gemm_ws.gates(96) and gemm_ws.gates(64)


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
    "the second half waits for a slot that stays empty": ("a.lag < (p.shared_tiles > 0 ? p.part_groups : p.groups) ? a.lag : 0", "a.lag"),
    "bias of row g + 8 of row g": ("if (left > 8) bias[1]", "if (left > 8) bias[0]"),
    "rows past the last are stored": ("n < p.n ? m_end - m : 0", "n < p.n ? 16 * PAIRS : 0"),
    "the chunks of rows are not swapped back": ("mine = at_chunk(thread / kChunks, thread % kChunks)", "mine = staging + thread * 16"),
    "rows are stored before all warps have written them": ("  sync();\n  T* to", "  T* to"),
    "a tile is staged before the last one has been stored": ("  if (thread == 0) tma_store_wait_read();  // the previous tile\n", ""),
    "a tile is stored before all warps have staged it": ("  fence_proxy_async();\n  bar_sync(barrier, 128);\n", "  fence_proxy_async();\n"),
    "a CTA ends before its last tile is stored": ("if (kByTma && (threadIdx.x & 127) == 0) tma_store_wait_read();  // of the last", "// of the last"),
    "the staging is written before all warps have read it": ("  sync();                                    // the previous", "  // the previous"),
}  # fmt: skip
OF_GATING = {
    "gate is taken for up": ("has_up ? got[f][i] : own[a]", "has_up ? own[a] : got[f][i]"),
    "sums are read before they are sent": ("bar_sync(barrier, 64);\n  float got", "float got"),
    "the staging is written before it is read": ("bar_sync(barrier, 64);  // before either", "// before either"),
    "two pairs of warps share a barrier": ("warp / 4 * kGatedTiles + warp % kGatedTiles", "warp % kGatedTiles"),
    "32 rows begin where 64 do": ("(index & 1) * kHalf", "0"),
    "rows of up begin with a block": ("up_block & 1 ? stride - kHalf : kHalf", "kHalf"),
    "rows of gate past the last": ("b < here * 2", "b < C * 2"),
    "a bias of gate for up": ("(index & kGatedTiles) ? p.n + column : column", "column"),
    "rows of y are as long as gate and up": ("p.n = a.gated ? a.n / 2 : a.n", "p.n = a.n"),
    "both warps store the same rows": ("m0 + (has_up ? PAIRS * 8 : 0)", "m0"),
    "fragments of the other half are stored": ("min(m_end, first + PAIRS * 8)", "m_end"),
    "reciprocals overflow": ("fminf(-kLog2e * gate_a, 60.f)", "-kLog2e * gate_a"),
}  # fmt: skip
QUICK = ("gate is taken for up",)
"""Those of `make test`."""
SOURCES = ("gemm_ws.cuh", "gemm_ws_tiles.cuh", "entry.h")


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow)
        for fault in (*FAULTS, *OF_GATING)
    ],
)
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    """Each in a copy of the sources, by one of a few calls."""
    right, changed = (FAULTS | OF_GATING)[fault]
    texts = {name: (ROOT / "kernels" / FOLDER / name).read_text() for name in SOURCES}
    assert sum(text.count(right) for text in texts.values()) == 1
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(right, changed))
    out = build(tmp_path / "fault.so", "int4_g128", tuple(FEW), tmp_path)
    # What is wrong may write anywhere, so it is a process of its own.
    program = f"""
import ctypes, sys
from tests.native.test_gemm_ws_fibers import is_seen
sys.exit(0 if is_seen(ctypes.CDLL({str(out)!r}), {fault in OF_GATING}) else 3)
"""
    ended = forked.run("-c", program, path=[ROOT])
    # 3: not seen; 1: is_seen itself has failed. To end by a signal is one way to be seen.
    assert ended.returncode <= 0, ended.stderr


FEW = [shape for shape in SAMPLE if key_of(shape) in ("128x4x1x1", "64x1x4x1", "80x2x1x1")]
"""Shapes that planted faults are compiled for."""


def is_seen(library: ctypes.CDLL, gated: bool, orders: tuple[int, ...] = (1, 6, 7, 2, 5)) -> bool:
    """Whether one of a few calls is wrong, of gate and up or of other products."""
    products = (
        [(320, "silu_mul"), (256, "bias+silu_mul")] if gated else [(200, "none"), (264, "bias+residual")]
    )
    for order in orders:
        for shape in FEW:
            for partition in partitions_of("int4_g128", shape, 1152, 3):
                for n, epilogue in products:
                    call = (shape, partition, 65, n, 1152, epilogue)
                    if wrong(library, "int4_g128", *call, order=order):
                        return True
            lags = gemm_ws.lags_of(formats()["int4_g128"], shape)
            # A CTA of fewer groups than the lag, and one of several tiles. Each slice needs a group: fewer are refused.
            calls = [(gemm_ws.Partition(1, 0, 3, lag), 65) for lag in lags]
            for partition, m in (*calls, (gemm_ws.Partition(1, 0, 1), 300)):
                call = (shape, partition, m, 200, 128 * shape.slices)
                if wrong(library, "int4_g128", *call, order=order):
                    return True
            call = (shape, gemm_ws.Partition(1, 0, 3), 65, 64, 512, "silu_mul")
            found, y = answer(library, "int4_g128", *call, size=100.0)
            if gated and (
                found
                or not torch.equal(
                    y[:1], answer(library, "int4_g128", *call[:2], 1, *call[3:], size=100.0)[1]
                )
            ):
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_nothing_is_seen_without_a_fault(libraries: Library, gated: bool, order: int) -> None:
    assert not is_seen(libraries("int4_g128", FEW[0]), gated, (order,))
