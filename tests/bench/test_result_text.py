"""The form of result files: lines, rounding, quantiles, and the weight of those in the tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.bench.result_text import QUANTILES, quantiles, rounded, summarized, text

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LIMIT = 2_500_000
"""Bytes of all result files."""


def test_a_row_is_a_line() -> None:
    data = {"schema": 1, "about": {"cpu": {"cores": 2}}, "rows": [{"us": 1.5}, {"us": 2.0}], "none": []}
    assert text(data) == (
        '{\n"schema":1,\n"about":{"cpu":{"cores":2}},\n"rows":[\n{"us":1.5},\n{"us":2.0}\n],\n"none":[]\n}\n'
    )
    assert json.loads(text(data)) == data


def test_five_digits_and_no_fewer_before_the_point() -> None:
    assert rounded({"us": [4.192969564235572, 0.0016647248, 1795332613.21]}) == {
        "us": [4.193, 0.0016647, 1795332613.0]
    }
    assert rounded([0.0, -1 / 3, 12, "1.23456789", None, True]) == [
        0.0,
        -0.33333,
        12,
        "1.23456789",
        None,
        True,
    ]
    exact = {"error": 2.098851728505209e-07}
    assert json.loads(text(exact, digits=None)) == exact != json.loads(text(exact))


def test_quantiles_replace_long_lists_of_samples() -> None:
    samples = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert quantiles(samples) == [7, 1.0, 2.5, 4.0, 5.5, 9.0]
    data = {
        "rows": [
            {
                "us": 4.0,
                "samples": {"a": samples, "b": samples},
                "samples_us": samples,
                "isolated_samples": samples[:3],
                "inner": [{"samples": [{"wall": us, "cpu": 1.0} for us in samples]}],
            }
        ]
    }
    (row,) = summarized(data)["rows"]
    assert row["quantiles"] == {"a": quantiles(samples), "b": quantiles(samples)} and "samples" not in row
    assert row["quantiles_us"] == quantiles(samples) and row["isolated_samples"] == samples[:3]
    assert row["inner"] == [{"quantiles": {"wall": quantiles(samples), "cpu": [7, 1.0, 1.0, 1.0, 1.0, 1.0]}}]
    assert summarized(data)["quantiles"] == QUANTILES


@pytest.mark.parametrize("data", [{"rows": [{"samples": [1.0] * 5}]}, {"rows": [{"samples_of": "text"}]}])
def test_other_data_stays(data: dict[str, object]) -> None:
    assert summarized(data) == data


def heavy(folder: Path, limit: int) -> list[str]:
    """The largest files of a folder that together exceeds `limit` bytes."""
    sizes = sorted(
        ((path.stat().st_size, path.name) for path in folder.rglob("*") if path.is_file()), reverse=True
    )
    return (
        [f"{name}: {size:,} bytes" for size, name in sizes[:5]]
        if sum(size for size, _ in sizes) > limit
        else []
    )


def test_result_files_stay_light(tmp_path: Path) -> None:
    """Result files keep what a claim needs: CONTRIBUTING, "Requirements for a change"."""
    assert heavy(RESULTS, LIMIT) == []
    (tmp_path / "raw.json").write_text("1" * 100)
    assert heavy(tmp_path, 99) == ["raw.json: 100 bytes"] and heavy(tmp_path, 100) == []


def test_result_files_have_the_form_of_the_writer() -> None:
    """Every file with rows is as `text` writes it; stores are written by the store."""
    for path in RESULTS.rglob("*.json"):
        content = path.read_text(encoding="utf-8")
        data = json.loads(content)
        if isinstance(data, dict) and "rows" in data:
            assert content in (text(data), text(data, digits=None)), (
                f"{path.name}: write it with bench.result_text"
            )
