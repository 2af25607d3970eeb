"""kernelbench of several ranks, on a CPU: times of collective kernels, saved for selection, and decode steps of a shared model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.autotune.worker_group import WorkerGroup
from gristmill.bench import rank_rows
from gristmill.bench.cli import cli
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.store import Store
from tests.bench.test_decode import TINY


def test_collective_kernels_are_timed_and_saved(
    policy_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_file()
    monkeypatch.setattr(rank_rows, "ROUNDS", 3)
    out = tmp_path / "all_reduce.json"
    arguments = ["--ranks", "2", "--problem", "m=3,n=40", "--target", "cpu", "--kernels", "*_torch"]
    arguments += ["--baseline", "all_reduce_torch", "--save", "--json", "--results", str(out)]
    result = CliRunner().invoke(cli, ["bench", "all_reduce", *arguments])
    assert result.exit_code == 0, result.output
    rows = {row["kernel"]: row for row in json.loads(result.stdout)}
    assert set(rows) == {"all_reduce_torch", "all_reduce_ordered_torch"}
    for row in rows.values():
        assert row["problem"] == "m=3,n=40,world=2" and row["error"] == 0 and not row["reason"]
        assert set(row["times"]) == {"eager,cold", "eager,hot"} and row["us"] > 0
    assert rows["all_reduce_torch"]["speedup"] == 1
    assert all(len(row["samples"]) == 3 for row in json.loads(out.read_text())["rows"])
    saved = Store.read(Policy.current().store_path)
    assert {timing.problem for timing in saved.timings} == {"m=3,n=40,world=2"}


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"ok": True, "times": {"eager,hot": us}} for us in ([1.0, 5.0], [3.0, 2.0])]
    group = WorkerGroup(2)
    monkeypatch.setattr(group, "_together", lambda *task: ranks)
    assert group.time(None, None, {}, None, "cpu", 2)["times"] == {"eager,hot": [3.0, 5.0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_norm", "--ranks", "2"], "--ranks is of collective operations"),
        (["all_reduce", "--ranks", "2", "--problem", "m=1,n=8,world=2"], "the number of ranks once"),
    ],
)
def test_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments, "--target", "cpu"])
    assert result.exit_code == 2 and message in result.output


@pytest.mark.slow
def test_a_model_of_two_ranks(tmp_path: Path, policy_file: Any) -> None:
    policy_file()
    sizes = tmp_path / "tiny.json"
    sizes.write_text(json.dumps(TINY))
    arguments = [
        "--model",
        str(sizes),
        "--quant",
        "bf16",
        "--batch",
        "1,3",
        "--context",
        "20",
        "--steps",
        "3",
    ]
    result = CliRunner().invoke(cli, ["decode", *arguments, "--ranks", "2", "--target", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["batch"], row["ranks"]) for row in rows] == [(1, 2), (3, 2)]
    # Which is larger is no matter of this model: its norms are as long as ranks that share cores wait for each other.
    assert all(row["norm_ms"] > 0 and row["device_ms"] > 0 for row in rows)
    assert "all_reduce_add_rms_norm" in {row["op"] for row in rows[0]["kernels"]}
