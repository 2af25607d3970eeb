"""kernelbench check --instructions: a separate cause for every exit code, and a reason for what cannot be
counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gristmill.autotune.place import place
from gristmill.bench import baseline, count_baseline, counts
from gristmill.bench.cli import cli
from gristmill.bench.statistics.verdict import FASTER, SAME, SLOWER
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.targets.probe import probe_cpu
from tests.bench import slowed
from tests.bench.test_check import planted

TARGET = "cpu:avx2" if "avx2" in str(probe_cpu().levels) else "cpu:base"
HERE = place(TARGET)
PROBLEM = slowed.OP.problem("m=50,n=1024")
pytestmark = pytest.mark.skipif(bool(counts.missing(HERE)), reason=counts.missing(HERE))


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["check", *arguments, "--instructions", "--target", TARGET])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline of rms_norm_cpu."""
    path = tmp_path_factory.mktemp("counts") / "b.json"
    result = run(
        str(path),
        "--update",
        "--op",
        "rms_norm",
        "--kernels",
        "rms_norm_cpu",
        "--problem",
        str(PROBLEM),
        "--json",
    )
    assert result.exit_code == 0 and [e["kernel"] for e in json.loads(result.stdout)] == ["rms_norm_cpu"], (
        result.output
    )
    return path


def changed(source: Path, path: Path, factor: float = 1.0, **environment: str) -> Path:
    data = json.loads(source.read_text())
    data["parts"][0]["environment"] |= environment
    for entry in data["parts"][0]["entries"]:
        entry["instructions"] = round(entry["instructions"] * factor)
    path.write_text(json.dumps(data))
    return path


def test_counts_repeat_and_nothing_is_slower(written: Path, tmp_path: Path) -> None:
    result = run(
        str(written), "--json", "--junit", str(tmp_path / "j.xml"), "--markdown", str(tmp_path / "m.md")
    )
    row = json.loads(result.stdout)["rows"][0]
    assert result.exit_code == 0 and row["verdict"] == SAME and abs(row["change"] - 1) < 1e-3
    assert row["instructions"] > 50 * 1024 / 8, "less than a vector instruction for every eight numbers"
    assert (
        'failures="0"' in (tmp_path / "j.xml").read_text()
        and "instructions |" in (tmp_path / "m.md").read_text()
    )


def test_eight_percent_longer_is_1(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = replace(slowed.SLOWER, name="rms_norm_cpu")
    monkeypatch.setattr(count_baseline, "named", lambda op, pattern: [longer])
    result = run(str(written), "--json")
    row = json.loads(result.stdout)["rows"][0]
    assert result.exit_code == 1 and row["verdict"] == SLOWER and 1.075 < row["change"] < 1.085


def test_fewer_are_fine(written: Path, tmp_path: Path) -> None:
    result = run(str(changed(written, tmp_path / "b.json", 2.0)), "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["rows"][0]["verdict"] == FASTER


def test_one_wrong_block_scale_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "op": "linear",
        "problem": "m=5,n=64,k=256,w=int4_g128",
        "kernel": "linear_cpu",
        "instructions": 1,
    }
    path = tmp_path / "b.json"
    path.write_text(
        json.dumps({"schema": 1, "parts": [{"environment": counts.environment(HERE), "entries": [entry]}]})
    )
    assert run(str(path)).exit_code == 1, "the right kernel is only slower than one instruction"
    monkeypatch.setattr(count_baseline, "named", lambda op, pattern: [planted()])
    result = run(str(path), "--json")
    assert result.exit_code == 2 and "over the tolerance" in json.loads(result.stdout)["rows"][0]["reason"]


@pytest.mark.parametrize("other", [{"compiler": "GNU 99"}, {"target": "cpu:neon"}, {"libc": "musl 1"}])
def test_another_environment_is_4(written: Path, tmp_path: Path, other: dict[str, str]) -> None:
    result = run(str(changed(written, tmp_path / "b.json", **other)), "--json")
    (value,) = other.values()
    assert result.exit_code == 4 and f"the baseline's is {value}" in json.loads(result.stdout)["reason"]


def test_without_valgrind_it_is_4_and_says_so(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        counts.shutil, "which", lambda name: None if name == "valgrind" else f"/usr/bin/{name}"
    )
    result = run(str(written), "--json")
    assert result.exit_code == 4 and "valgrind not installed" in json.loads(result.stdout)["reason"]


def test_what_callgrind_cannot_run_is_4(written: Path) -> None:
    result = CliRunner().invoke(cli, ["check", str(written), "--instructions", "--target", "cpu", "--json"])
    if place("cpu").target.name.partition(":")[2] not in counts.LEVELS:
        assert result.exit_code == 4 and "callgrind runs no code of" in json.loads(result.stdout)["reason"]


def test_no_baseline_is_5(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.json"))
    assert result.exit_code == 5 and "--instructions --update" in result.stderr


def test_an_update_keeps_other_parts(written: Path, tmp_path: Path) -> None:
    path = changed(written, tmp_path / "b.json", compiler="GNU 99")
    assert run(str(path), "--update").exit_code == 2, "there are no lines for this compiler to update"
    assert (
        run(
            str(path), "--update", "--op", "rms_norm", "--kernels", "rms_norm_cpu", "--problem", str(PROBLEM)
        ).exit_code
        == 0
    )
    assert [
        part["environment"]["compiler"] == "GNU 99" for part in baseline.read(path, count_baseline.Entry)
    ] == [True, False]


def test_what_cannot_be_recorded_is_said() -> None:
    op, kernel = (default_registry().op("rms_norm"), default_registry().kernel("rms_norm", "rms_norm_torch"))
    with pytest.raises(counts.CountError, match="rms_norm_torch made no call into the native library"):
        counts.record(op, kernel, op.problem("m=2,n=64"), HERE)


def test_experts_are_recorded() -> None:
    """A call with a struct of options, and weights of experts."""
    op, kernel = (
        default_registry().op("grouped_linear"),
        default_registry().kernel("grouped_linear", "grouped_linear_cpu"),
    )
    recording = counts.record(op, kernel, op.problem("m=4,e=4,n=32,k=64"), HERE)
    assert recording.wrong == "" and [len(call.options) for call in recording.calls] == [5]
    assert counts.replayed([recording.calls])[0] > 1000


def test_a_replay_that_leaves_other_bytes_is_refused() -> None:
    recording: Any = counts.record(slowed.OP, slowed.HONEST, PROBLEM, HERE)
    (call,) = recording.calls
    spoilt = replace(call, after=(*call.after[:-1], bytes(len(call.after[-1]))))
    with pytest.raises(
        counts.CountError, match=r"other bytes than when it was recorded were left by gm_rms_norm"
    ):
        counts.replayed([[spoilt]])


def test_this_project_holds_its_kernels_to_their_counts() -> None:
    """ci/check_counts.sh has something to compare with: lines of several operations, for one compiler."""
    parts = baseline.read(Path(__file__).parents[2] / "ci" / "kernel_counts.json", count_baseline.Entry)
    assert all(
        len({entry.op for entry in part["entries"]}) >= 6 and "compiler" in part["environment"]
        for part in parts
    )
