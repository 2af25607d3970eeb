"""Loading next to safetensors: the bar of pass-through formats, in processor time, on checkpoints of a tenth of a gigabyte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gristmill.bench import loading
from gristmill.quant import quantize
from gristmill.quant.formats import open_format
from gristmill.runtime.loader.checkpoint import Checkpoint

LIMIT = 2.0
"""1.5 is the bar of the measurement of 2 GB (bench/results/cpu); processor time of little files on a busy machine is noisier."""
SMALL = {"q": (1024, 1024), "k": (256, 1024), "v": (256, 1024), "o": (1024, 1024), "gate": (4096, 1024), "up": (4096, 1024),
         "down": (1024, 4096)}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SHAPES", SMALL)


def best(case: str, folder: Path) -> float:
    """The least processor time of the reader, as a multiple of safetensors' least."""
    return float(loading.measure(case, folder, 50_000_000, rounds=5)[0]["reader_cpu_min"])


@pytest.mark.parametrize("case", ["fp8 fp8_block", "gptq int4_g128", "modelopt nvfp4", "compressed-tensors int8_ch"])
def test_a_reader_is_about_as_fast_as_a_copy(case: str, tmp_path: Path) -> None:
    assert best(case, tmp_path) < LIMIT


def test_a_reader_that_converts_to_floats_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: every FP8 weight is decoded to look for NaN."""
    from gristmill.quant import numeric

    monkeypatch.setattr(numeric, "e4m3_largest", lambda codes: float(numeric.e4m3_decode(codes).abs().max()))
    assert best("fp8 fp8_block", tmp_path) > LIMIT


def test_what_is_timed_is_the_checkpoint(tmp_path: Path) -> None:
    """The reader's tensors hold the values that were written; the loader's are they, joined; both in their own memory."""
    case = loading.CASES["gptq int4_g128"]()
    table = loading.synthesize(case, tmp_path, 1)
    generator = torch.Generator().manual_seed(0)
    q = quantize(torch.randn(1024, 1024, generator=generator) * 0.02, "int4_g128")
    read = open_format(case.config).read(Checkpoint(tmp_path), "layers.0.q", (1024, 1024))
    assert read is not None and torch.equal(read.weight.codes, q.codes)
    held: Mapping[str, Any] = dict(zip((w.target for w in table.weights), loading.loaded(tmp_path, table, case.config), strict=True))
    (qkv,) = held["layers.0.qkv"]
    assert torch.equal(qkv.weight.codes[:1024], q.codes)
    for (part,) in held.values():
        assert all(t.untyped_storage().resizable() for t in part.weight.tensors().values())
    assert len(loading.readers(tmp_path, table, case.config)) == len(SMALL)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--gigabytes", "0.01", "--rounds", "1", "--case", "gristmill", "--folder", str(tmp_path), "--out", str(out)]
    result = CliRunner().invoke(loading.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and '"cache": "cold"' in out.read_text() and not list(tmp_path.glob("tmp*"))
    assert CliRunner().invoke(loading.main, ["--case", "none of them"]).exit_code == 2
