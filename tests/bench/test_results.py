"""Result files: measured again, reproduced by command, followed over time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gristmill.autotune import floor
from gristmill.autotune.place import place
from gristmill.bench import rerun as again
from gristmill.bench.cli import cli
from gristmill.bench.history import history
from gristmill.bench.result_file import ResultError, read
from gristmill.bench.statistics.verdict import Rule
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.store import StoreError
from tests import forked


def run(*arguments: str):
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture(scope="module", autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory):
    """A store and ceilings for this file only."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "policy.toml").write_text(f'cache = "{folder}"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_POLICY", str(folder / "policy.toml"))
        yield folder


@pytest.fixture(scope="module")
def results(own_store: Path) -> Path:
    path = own_store / "r.json"
    result = run(
        "bench",
        "rms_norm",
        "--problem",
        "m=64,n=1024",
        "--kernels",
        "rms_norm_cpu,rms_norm_torch",
        "--seconds",
        "0.1",
        "--target",
        "cpu",
        "--results",
        str(path),
        "--json",
    )
    assert result.exit_code == 0, result.output
    return path


def test_rerun_says_where_it_differs(results: Path, tmp_path: Path) -> None:
    data = json.loads(results.read_text())
    data["rows"][0]["us"] /= 50  # as if measured on a far faster machine
    data["rows"][0]["samples"] = [us / 50 for us in data["rows"][0]["samples"]]
    data["rows"].append(data["rows"][1] | {"kernel": "rms_norm_gone"})
    data["rows"].append(data["rows"][1] | {"us": None, "samples": [], "reason": "torch was not installed"})
    data["rows"].append(data["rows"][1] | {"us": None, "samples": [], "kernel": "rms_norm_flashinfer"})
    data["environment"]["device"] = "Abacus"
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(data))
    result = run("rerun", str(changed), "--target", "cpu", "--min-effect", "0.9", "--json")
    output = json.loads(result.stdout)
    slower, same, gap, new = output["rows"]  # a row that had no time and has none does not differ
    assert (
        result.exit_code == 0
        and (slower["verdict"], gap["verdict"]) == ("SLOWER", "GAP")
        and slower["ratio"] > 20
    )
    assert 0.2 < same["ratio"] < 5  # the two are not timed in turn: the load of the machine may have changed
    assert "rms_norm_gone" in gap["reason"]
    assert (
        new["verdict"] == "NEW"
        and new["then_us"] is None
        and new["now_us"] > 0
        and "torch was not installed" in new["reason"]
    )
    assert any(line.startswith("device: Abacus then") for line in output["environment"])


def test_what_was_uncertain_then_is_not_counted_against_now(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(results.read_text())
    data["rows"] = data["rows"][:1]
    monkeypatch.setattr(
        again, "_measure", lambda row, here, rounds: ([12 + 0.01 * (7 * n % 16) for n in range(16)], 0.0)
    )
    # A median of 10 in both.
    for then, verdict in (
        ([6, 8, 10, 14, 16], "SAME"),
        ([9.9, 10, 10, 10, 10.1], "SLOWER"),
    ):
        data["rows"][0] |= {"us": 10, "samples": then}
        actual = again.rerun(data, place("cpu"), Rule(min_effect=0.1, looks=1))[0]
        assert actual.verdict == verdict and abs(actual.as_dict()["ratio"] - 1.2) < 0.02


def test_a_repro_runs(results: Path) -> None:
    output = json.loads(run("repro", str(results), "0", "--json").stdout)
    assert output["command"].startswith(
        "kernelbench bench rms_norm --kernels rms_norm_cpu --problem m=64,n=1024 --target cpu"
    )
    process = forked.run("-c", output["script"], env={"PATH": ""})
    assert process.returncode == 0 and process.stdout.endswith("us\n"), process.stderr
    assert run("repro", str(results), "7").exit_code != 0


def test_a_repro_is_of_the_rows_own_configuration_and_way(results: Path, tmp_path: Path) -> None:
    data = json.loads(results.read_text())
    row = {
        "op": "rms_norm",
        "problem": "m=64,n=1024",
        "kernel": "rms_norm_cpu",
        "us": 1.0,
        "config": {"level": "base"},
        "timing": "eager,hot",
    }
    tuned = {
        "op": "linear",
        "problem": "m=1,n=64,k=64,w=int4_g32",
        "kernel": "linear_w4a16_gemm_ws_sm90",
        "us": 1.0,
        "config": {"mt": 8, "ctas": 1},
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data | {"rows": [row, tuned]}))
    output = json.loads(run("repro", str(path), "0", "--json").stdout)
    assert (
        "config = {'level': 'base'}" in output["script"]
        and "hot=True), eager=True, isolated=False)" in output["script"]
    )
    assert "--config" not in output["command"]  # the kernel has only one configuration here
    assert "--config ctas=1,mt=8" in json.loads(run("repro", str(path), "1", "--json").stdout)["command"]


def test_a_configuration_can_be_timed() -> None:
    arguments = (
        "bench",
        "rms_norm",
        "--problem",
        "m=4,n=64",
        "--target",
        "cpu",
        "--quick",
        "--seconds",
        "0.01",
        "--json",
        "--config",
    )
    row = json.loads(run(*arguments, "level=base", "--kernels", "rms_norm_cpu").stdout)[0]
    assert row["config"] == {"level": "base"} and row["us"]
    for wrong, kernels, complaint in (
        ("tile=3", "rms_norm_cpu", "has no 'tile' in its configuration; it has level"),
        ("level=base", "rms_norm_*", "--config is of one kernel"),
    ):
        result = run(*arguments, wrong, "--kernels", kernels)
        assert result.exit_code == 2 and complaint in result.output


def file(when: str, us: float, rng: np.random.Generator) -> dict:
    samples = list(us * (1 + 0.02 * np.abs(rng.standard_normal(15))))
    return {
        "when": when,
        "environment": {"device": "d"},
        "rows": [{"op": "o", "problem": "m=1", "kernel": "k", "us": us, "samples": samples}],
    }


def test_history_finds_the_change_and_no_other() -> None:
    rng = np.random.default_rng(0)
    truth = [10, 10, 10.1, 12, 12, 11.9, 8, 8]
    files = [(f"f{n}", file(f"2026-01-{n + 1:02}", us, rng)) for n, us in enumerate(truth)]
    rng.shuffle(files)
    series = history(files)[0]
    assert [p.file for p in series.points] == [f"f{n}" for n in range(8)]
    changed = {p.file: p.change for p in series.points if p.change is not None}
    assert (
        changed.keys() == {"f3", "f6"}
        and abs(changed["f3"] - 1.2) < 0.03
        and abs(changed["f6"] - 0.67) < 0.03
    )


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    row = {"op": "o", "problem": "p", "kernel": "k", "us": 1.0}
    wrong = [
        ({"schema": 2, "rows": []}, "schema 1, found 2"),
        ({"rows": [], "environment": []}, "environment: expected an object"),
        ({"rows": [row | {"us": "3"}]}, r"rows\[0\]: us: expected microseconds or null, found '3'"),
        ({"rows": [row, row | {"us": -1}]}, r"rows\[1\]: us"),
        ({"rows": [row | {"samples": [1, 0]}]}, "samples: .*found 0"),
        ({"rows": [row | {"op": 3}]}, "op: expected text"),
        ({"rows": [row | {"timing": 5}]}, "timing: expected text"),
        ({"rows": [row | {"config": "x"}]}, "config: expected an object"),
        ({"rows": [row | {"gbs": [1]}]}, r"gbs: expected a number or null, found \[1\]"),
        ({"rows": [row | {"verdict": 1}]}, "verdict: expected text"),
        ({"rows": [row | {"times": 1e308}]}, "times: expected an object"),
        ({"rows": [row | {"times": {"eager,hot": 0}}]}, "times: eager,hot: expected microseconds, found 0"),
        (
            {"rows": [row], "environment": {"target": 1}},
            "environment: target: expected text or null, found 1",
        ),
        ({"rows": [row], "ceilings": -1}, "ceilings: expected read_gbs and tflops"),
        ({"rows": [row], "ceilings": {"read_gbs": 1, "tflops": {"fp32": {}}}}, "ceilings: expected read_gbs"),
    ]
    texts = [
        ("[1,\n", "line 2"),
        ("[]", "found list"),
        ('{"rows": [{}]}', r"rows\[0\]: expected op"),
        ("[" * 100_000, "maximum recursion depth.*expected a result file"),
        *((json.dumps(data), complaint) for data, complaint in wrong),
    ]
    for text, complaint in texts:
        path.write_text(text)
        with pytest.raises(ResultError, match=complaint):
            read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ResultError, match=r"x.json: byte 0 is not UTF-8"):
        read(path)


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "rms_norm", "--results"),
        ("compare", "rms_norm", "--results"),
        ("check", "b.json", "--junit"),
        ("tune", "rms_norm", "--results"),
        ("regret", "rms_norm", "--results"),
        ("decode", "--out"),
        ("shapes", "capture", "--out"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_measured(command: tuple[str, ...]) -> None:
    begin = time.process_time()
    result = run(*command, "/dev/null/r.json", *(["--", "generate"] if "capture" in command else []))
    assert (
        result.exit_code == 2
        and "/dev/null/r.json cannot be written" in result.output
        and time.process_time() - begin < 2
    )


def test_neither_is_it_for_a_store_that_cannot_be_added_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / "s.json"
    damaged.write_text('{"schema": 1,\n"timed": [')
    for name, path in (("absent", "/dev/null/store.json"), ("damaged", damaged)):
        (tmp_path / name).with_suffix(".toml").write_text(f'store = "{path}"\n')
    for command in (("bench", "rms_norm", "--save"), ("tune", "rms_norm")):
        monkeypatch.setenv("GRISTMILL_POLICY", str(tmp_path / "absent.toml"))
        result = run(*command, "--target", "cpu")
        assert result.exit_code == 2 and "the store /dev/null/store.json cannot be written" in result.output
        monkeypatch.setenv("GRISTMILL_POLICY", str(tmp_path / "damaged.toml"))
        with pytest.raises(StoreError, match="line 2"):
            CliRunner().invoke(cli, [*command, "--target", "cpu"], catch_exceptions=False)


def test_ceilings_that_cannot_be_kept_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('cache = "/dev/null/cache"\n')
    monkeypatch.setenv("GRISTMILL_POLICY", str(tmp_path / "policy.toml"))
    limits = floor.Ceilings(10.0, 10.0, (), 0.0)
    monkeypatch.setattr(floor, "_measure", lambda device: limits)
    monkeypatch.setattr(floor, "_read", lambda path: {})
    with pytest.warns(RuntimeWarning, match="cannot keep the ceilings"):
        assert floor.remeasure("cpu") == limits


def test_damaged_ceilings_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f'cache = "{tmp_path}"\n')
    monkeypatch.setenv("GRISTMILL_POLICY", str(tmp_path / "policy.toml"))
    key = floor._key("cpu", Policy.current())
    for text in ('{"schema": 1}', "\xff", json.dumps({"schema": 1, "devices": {key: {"read_gbs": 1}}})):
        (tmp_path / "ceilings.json").write_text(text, encoding="latin-1")
        with pytest.raises(floor.CeilingsError, match=r"ceilings.json: .*delete it"):
            floor.kept("cpu")
