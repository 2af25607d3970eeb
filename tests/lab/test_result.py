"""Rows of result files with only the fastest configuration of each kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.result import fastest_per_kernel, write_result


def row() -> dict[str, Any]:
    us = {"a_sm90/0": 3.0, "a_sm90/1": 2.0, "peer m=1": 4.0, "peer m=16": 5.0, "cublas": 9.0}
    return {
        "scheme": "int4",
        "n": 8,
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
    assert data["command"] == "c" and data["refused"] == {"b_sm90": "no"}
    assert data["names"] == ["a_sm90/1", "peer m=1", "cublas"]
    assert data["configurations"] == {"a_sm90": ""} and data["shared"] == {"int4": {"a_sm90": "depth=2,wk=4"}}
    candidates = [[0, 2.0, 1.75, 2.25, 0.5, ""], [1, 4.0, 3.75, 4.25, 0.5, ""], [2, 9.0, 8.75, 9.25, 0.5, ""]]
    assert data["rows"] == [
        {"scheme": "int4", "n": 8, "m": {"1": {"best": "a_sm90/1", "candidates": candidates}}}
    ]
    write_result(tmp_path / "x.json", data)
    assert json.loads((tmp_path / "x.json").read_text()) == data


def test_isolated_times_are_without_the_link() -> None:
    """The fastest isolated candidate is kept too; its samples have one link more than its time."""
    isolated = {"a_sm90/0": 5.0, "a_sm90/1": 6.0}
    samples = {name: [us + 1.5, us + 2.0, us + 2.5] for name, us in isolated.items()}
    given = row() | {"isolated_us": isolated, "isolated_samples": samples}
    data = fastest_per_kernel({"rows": [given]})
    kept = {data["names"][place]: rest for place, *rest in data["rows"][0]["m"]["1"]["candidates"]}
    assert kept["a_sm90/0"][4:] == ["1,8", 5.0, 4.75, 5.25] and kept["a_sm90/1"][5] == 6.0


def test_a_configuration_of_other_parts_keeps_its_names() -> None:
    other = row() | {"configs": {"a_sm90/1": {"wk": 4}}}
    data = fastest_per_kernel({"rows": [row(), other]})
    assert [one["m"]["1"]["candidates"][0][5] for one in data["rows"]] == ["", "wk=4"]


def test_what_rows_of_a_weight_share_is_written_once() -> None:
    """The scheme decides `bytes`; `wk` differs, and `depth` differs for another scheme only. A problem measured twice is in two rows."""

    def measured(m: int, **config: int) -> dict[str, Any]:
        return row() | {"m": m, "configs": {"a_sm90/1": config}}

    others = [row() | {"n": 9}, measured(1, bytes=1, depth=1, wk=5) | {"scheme": "int8"}]
    others[0]["configs"] = {"a_sm90/1": {"bytes": 2, "depth": 1, "wk": 4}}
    rows = [measured(1, bytes=2, depth=1, wk=4), measured(8, bytes=2, depth=3, wk=5), *others]
    data = fastest_per_kernel({"rows": [*rows, rows[0]]})
    assert [(one["scheme"], one["n"], [*one["m"]]) for one in data["rows"]] == [
        ("int4", 8, ["1", "8"]),
        ("int4", 9, ["1"]),
        ("int8", 8, ["1"]),
        ("int4", 8, ["1"]),
    ]
    assert data["configurations"] == {"a_sm90": "depth,wk"}
    assert data["shared"] == {"int4": {"a_sm90": "bytes=2"}, "int8": {"a_sm90": "bytes=1"}}
    values = [of_m["candidates"][0][5] for one in data["rows"] for of_m in one["m"].values()]
    assert values == ["1,4", "3,5", "1,4", "1,5", "1,4"]
