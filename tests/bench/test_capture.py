"""Problems of a live run are recorded with their numbers of calls, and can be tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import gristmill.ops as ops
from gristmill.bench.capture import capturing, read, write
from gristmill.bench.cli import cli
from gristmill.bench.commands.tune import jobs_of
from gristmill.bench.result_file import ResultError


def test_calls_are_counted_by_problem(policy_file, tmp_path: Path) -> None:
    policy_file()
    weight = torch.ones(64)
    plan = ops.bind("rms_norm", "n=64,x=fp32", "cpu")
    with capturing() as counts:
        for rows in (3, 3, 5, 0):
            x = torch.randn(rows, 64)
            plan(x, weight, 1e-5, torch.empty_like(x))
    plan(torch.randn(3, 64), weight, 1e-5, torch.empty(3, 64))
    assert counts == {("rms_norm", "m=3,n=64,x=fp32"): 2, ("rms_norm", "m=5,n=64,x=fp32"): 1}
    path = tmp_path / "live.json"
    write(path, counts, "test")
    assert [(c.problem, c.count) for c in read(path)] == [("m=3,n=64,x=fp32", 2), ("m=5,n=64,x=fp32", 1)]
    assert [str(job.problem) for job in jobs_of(read(path))] == ["m=3,n=64,x=fp32", "m=5,n=64,x=fp32"]
    result = CliRunner().invoke(
        cli, ["tune", "--shapes", str(path), "--target", "cpu", "--minutes", "0.3", "--json"]
    )
    rows = json.loads(result.stdout)["problems"]
    assert rows[0]["weight"] == 2 and rows[0]["state"] == "tuned" and rows[0]["saved_us"] is not None


def test_a_packed_weight_is_counted_too(policy_file) -> None:
    policy_file()
    plan = ops.bind("linear", "n=32,k=64,x=fp32,w=fp32", "cpu", layouts=frozenset({"dense_v1"}))
    x, out = torch.randn(5, 64), torch.empty(5, 32)
    with capturing() as counts:
        plan(x, [torch.randn(32, 64)], None, None, False, 32, out=out)
    assert list(counts) == [("linear", "m=5,n=32,k=64,x=fp32,w=fp32")]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    bad = '{"schema": 1, "calls": [{"op": "rms_nrom", "problem": "m=1", "count": 1}]}'
    for text, complaint in (
        ("{\n", "line 2"),
        ("[]", "captured shapes of schema 1"),
        (bad, r"calls\[0\]: .*rms_norm"),
    ):
        path.write_text(text)
        with pytest.raises(ResultError, match=complaint):
            read(path)


def test_a_run_that_fails_leaves_what_it_called(
    policy_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_file()
    out = tmp_path / "live.json"

    def run(args: list[str], **rest: object) -> None:
        ops.bind("rms_norm", "n=64,x=fp32", "cpu")(
            torch.randn(3, 64), torch.ones(64), 1e-5, torch.empty(3, 64)
        )
        raise RuntimeError("no memory after an hour")

    monkeypatch.setattr("gristmill.tools.cli.cli.main", run)
    result = CliRunner().invoke(cli, ["shapes", "capture", "--out", str(out), "--", "generate"])
    assert str(result.exception) == "no memory after an hour" and [
        (c.problem, c.count) for c in read(out)
    ] == [("m=3,n=64,x=fp32", 1)]


def test_a_run_that_calls_nothing_is_a_mistake(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["shapes", "capture", "--out", str(tmp_path / "x.json"), "--", "generate", "--help"]
    )
    assert (
        result.exit_code == 2 and "called no kernel" in result.output and not (tmp_path / "x.json").exists()
    )


def test_a_model_is_captured(policy_file, tmp_path: Path) -> None:
    policy_file()
    models = Path(__file__).parents[2] / "examples" / "models" / "docs-llama"
    out = tmp_path / "live.json"
    result = CliRunner().invoke(
        cli,
        [
            "shapes",
            "capture",
            "--out",
            str(out),
            "--json",
            "--",
            "generate",
            "--model",
            str(models),
            "--prompt",
            "The function",
            "--max-tokens",
            "4",
        ],
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert {"linear", "fused_add_rms_norm", "paged_attention", "sample"} <= {row["op"] for row in rows}
    assert sum(row["count"] for row in rows if row["op"] == "sample") == 4 and len(read(out)) == len(rows)
