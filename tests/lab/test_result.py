"""Rows of result files with only the fastest configuration of each kernel."""

from __future__ import annotations

import json
from pathlib import Path

from lab.result import fastest_per_kernel, write_result


def row() -> dict[str, object]:
    us = {"a_sm90/0": 3.0, "a_sm90/1": 2.0, "peer m=1": 4.0, "peer m=16": 5.0, "cublas": 9.0}
    return {
        "m": 1,
        "us": us,
        "samples": {name: [value - 0.5, value, value + 0.5] for name, value in us.items()},
        "errors": dict.fromkeys(us, 0.5),
        "configs": {"a_sm90/0": {"wk": 8, "depth": 1}, "a_sm90/1": {"wk": 4, "depth": 2}},
        "refused": {"b_sm90": "no"},
        "best": "a_sm90/1",
    }


def test_the_fastest_of_each_kernel_is_kept(tmp_path: Path) -> None:
    data = fastest_per_kernel({"command": "c", "rows": [row()]})
    assert data["configurations"] == {"a_sm90": "depth,wk"} and data["command"] == "c"
    assert data["refused"] == {"b_sm90": "no"}
    assert data["rows"] == [
        {
            "m": 1,
            "best": "a_sm90/1",
            "candidates": [
                ["a_sm90/1", 2.0, 1.75, 2.25, 0.5, "2,4"],
                ["peer m=1", 4.0, 3.75, 4.25, 0.5, ""],
                ["cublas", 9.0, 8.75, 9.25, 0.5, ""],
            ],
        }
    ]
    write_result(tmp_path / "x.json", data)
    assert json.loads((tmp_path / "x.json").read_text()) == data


def test_isolated_times_are_without_the_link() -> None:
    """The fastest isolated candidate is kept too; its samples have one link more than its time."""
    isolated = {"a_sm90/0": 5.0, "a_sm90/1": 6.0}
    samples = {name: [us + 1.5, us + 2.0, us + 2.5] for name, us in isolated.items()}
    given = row() | {"isolated_us": isolated, "isolated_samples": samples}
    rows = fastest_per_kernel({"rows": [given]})["rows"]
    kept = {candidate[0]: candidate for candidate in rows[0]["candidates"]}
    assert kept["a_sm90/0"][5:] == ["1,8", 5.0, 4.75, 5.25] and kept["a_sm90/1"][6] == 6.0


def test_a_configuration_of_other_parts_keeps_its_names() -> None:
    other = row() | {"configs": {"a_sm90/1": {"wk": 4}}}
    data = fastest_per_kernel({"rows": [row(), other]})
    assert data["rows"][1]["candidates"][0][5] == "wk=4"
