"""Generated files are what `make generate` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import generate  # noqa: E402


def test_every_generated_file_is_current() -> None:
    assert [str(path.relative_to(ROOT)) for path in generate.stale()] == [], "run make generate"


def test_a_file_that_was_edited_is_seen_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edited, current = tmp_path / "ops.pyi", tmp_path / "api.md"
    edited.write_text("eps: int")
    current.write_text("page")
    monkeypatch.setattr(generate, "FILES", {edited: lambda: "eps: float", current: lambda: "page"})
    assert generate.main(["--check"]) == 1 and f"{edited}: out of date" in capsys.readouterr().out
    assert edited.read_text() == "eps: int"
    assert generate.main([]) == 0 and capsys.readouterr().out == f"{edited}: written\n"
    assert edited.read_text() == "eps: float"
    assert generate.main(["--check"]) == 0 and capsys.readouterr().out == ""


def test_files_that_are_missing_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "api.md"
    monkeypatch.setattr(generate, "FILES", {path: lambda: "page"})
    assert generate.stale() == [path] and not path.exists()
    assert generate.stale(write=True) == [path] and path.read_text() == "page"


def test_the_readme_says_what_the_picture_shows() -> None:
    picture = generate.LINEAR_INT4
    rows = picture["speeds"](json.loads(picture["RESULTS"].read_text(encoding="utf-8")))
    ours = {m: speed for m, speed, _ in rows}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = f"{ours[1]:.1f} times as fast as cuBLAS in bf16 at one row, {ours[16]:.1f} times at 16, as fast at 4096]"
    assert said in text and abs(ours[4096] - 1) < 0.05
    assert f"docs/figures/{picture['FIGURE'].name})" in text and picture["RESULTS"].name in text
