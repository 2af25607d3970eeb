"""Loading compared with safetensors: the bar for pass-through formats, in processor time, on checkpoints of a
tenth of a gigabyte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gristmill.quant import quantize
from lab import loading, loading_cases, loading_memory, loading_turns

LIMIT = 2.0
"""The bar of the measurement with 2 GB (bench/results/cpu) is 1.5; processor time for small files on a busy
machine is noisier."""
SMALL = {name: (n // 2, k // 2) for name, (n, k) in loading_cases.SHAPES.items()}
"""A few megabytes each: smaller ones spend their time in checks."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_cases, "SHAPES", SMALL)


def best(
    case: str,
    folder: Path,
    who: str = "reader",
    run_turn: loading.Turn = loading.turn,
    size: int = 100_000_000,
    rounds: int = 5,
) -> float:
    """Returns the least processor time for a checkpoint of `size` bytes, as a multiple of safetensors' least."""
    return float(loading.measure(case, folder, size, rounds=rounds, run_turn=run_turn)[0][f"{who}_cpu_min"])


@pytest.mark.parametrize(
    "case",
    [
        "gptq int4_g128",
        "modelopt nvfp4",
        pytest.param("fp8 fp8_block", marks=pytest.mark.slow),
        pytest.param("compressed-tensors int4_g128", marks=pytest.mark.slow),
        pytest.param("mxfp4 experts", marks=pytest.mark.slow),
    ],
)
def test_loading_is_about_as_fast_as_a_copy(case: str, tmp_path: Path) -> None:
    with loading.processes() as run_turn:
        assert best(case, tmp_path, "loader", run_turn) < LIMIT


def test_a_reader_that_converts_to_floats_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: every FP8 weight is decoded to look for NaN."""
    from gristmill.quant import numeric

    monkeypatch.setattr(numeric, "e4m3_largest", lambda codes: float(numeric.e4m3_decode(codes).abs().max()))
    assert best("fp8 fp8_block", tmp_path, size=10_000_000, rounds=1) > LIMIT


@pytest.mark.parametrize("name", loading.CASES)
def test_what_is_timed_is_the_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's tensors equal the joined tensors of the reader. All own their memory, which the kernels'
    layout shares."""
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    for weight, (n, k) in SMALL.items():  # nothing is timed here
        monkeypatch.setitem(loading_cases.SHAPES, weight, (n // 4, k // 4))
    monkeypatch.setitem(loading_cases.STACKED, "mlp.experts.gate_up_proj", (128, 64))
    monkeypatch.setitem(loading_cases.STACKED, "mlp.experts.down_proj", (64, 64))
    checkpoint = loading.synthesize(loading.CASES[name](), tmp_path, 1)
    parts = iter(loading_turns.readers(checkpoint))
    loaded, packed = loading_turns.loaded(checkpoint), loading_turns.packed(checkpoint)
    assert len(loaded) == len(checkpoint.table.weights) == len(packed)
    for weight, quantized, slots in zip(checkpoint.table.weights, loaded, packed, strict=True):
        read = [next(parts).dequantize() for _ in weight.sources]
        assert torch.equal(quantized.dequantize(), torch.cat(read, -2)) and bool(read[0].count_nonzero())
        assert all(t.untyped_storage().resizable() for t in quantized.tensors().values())
        assert torch.equal(slots.slots["codes"], quantized.codes)


def test_gptq_is_what_was_written(tmp_path: Path) -> None:
    checkpoint = loading.synthesize(loading.CASES["gptq int4_g128"](), tmp_path, 1)
    q = quantize(torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)) * 0.02, "int4_g128")
    assert torch.equal(loading_turns.loaded(checkpoint)[0].codes[:2048], q.codes)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "--gigabytes",
        "0.01",
        "--rounds",
        "1",
        "--case",
        "gristmill",
        "--folder",
        str(tmp_path),
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(loading.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and '"cache":"cold"' in out.read_text() and not list(tmp_path.glob("tmp*"))
    assert CliRunner().invoke(loading.main, ["--case", "none of them"]).exit_code == 2


PAGE = Path(__file__).parents[2] / "docs" / "performance" / "loading.md"
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu"


@pytest.mark.parametrize(
    ("file", "module"), [("loading_2gb.json", loading), ("loading_memory.json", loading_memory)]
)
def test_the_page_has_the_numbers_of_the_result_files(file: str, module: Any) -> None:
    rows, text = json.loads((RESULTS / file).read_text())["rows"], PAGE.read_text()
    for row in [module.COLUMNS, *module.cells(rows)]:
        assert f"| {' | '.join(row)} |\n" in text


def test_every_format_was_measured_warm_and_cold() -> None:
    """For all formats whose codes are not repacked, the bar with the files in the page cache is 1.5."""
    rows = json.loads((RESULTS / "loading_2gb.json").read_text())["rows"]
    assert {(r["case"], r["cache"]) for r in rows} == {
        (case, cache) for case in loading.CASES for cache in ("warm", "cold")
    }
    assert all(
        r["loader_cpu_median"] < 1.5
        for r in rows
        if r["cache"] == "warm" and not r["step"].startswith("repacked")
    )


def test_peaks_are_within_the_bar() -> None:
    rows = json.loads((RESULTS / "loading_memory.json").read_text())["rows"]
    assert {r["kind"] for r in rows} == set(loading_memory.KINDS) and all(
        r["beside"] <= r["two_largest"] for r in rows
    )
