"""bench and compare: timings side by side, speedups, named gaps, suites and models, and how wrong kernels are
reported."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gristmill.autotune import worker
from gristmill.autotune.candidate import timing_name
from gristmill.autotune.place import place
from gristmill.bench import compare, timings
from gristmill.bench.cli import cli
from gristmill.bench.problems import Asked, baseline_of, chosen, missing_peers
from gristmill.bench.shapes import MIXES, calls, load_config
from gristmill.bench.suites import SuiteError, expand, load_suite, suite_names
from gristmill.bench.timings import kernel_rows
from gristmill.kernel_registry.registry import UnknownError, default_registry
from tests.bench import cheats

OP = default_registry().op("rms_norm")


@pytest.fixture(autouse=True)
def own_store(policy_file):
    policy_file()
    cheats.leave()
    yield
    cheats.leave()


def answer(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(cli, [*arguments, "--target", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_cold_and_hot_stand_side_by_side_with_a_speed_up(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rows = answer(
        "bench",
        "rms_norm",
        "--problem",
        "m=256|512,n=4096",
        "--kernels",
        "rms_norm_cpu",
        "--baseline",
        "*_torch",
        "--seconds",
        "0.05",
        "--results",
        str(path),
    )
    assert [(r["problem"], r["kernel"]) for r in rows] == [
        (f"m={m},n=4096", name) for m in (256, 512) for name in ("rms_norm_cpu", "rms_norm_torch")
    ]
    for row in rows:
        assert (
            row["times"].keys() == {"eager,cold", "eager,hot", "eager,cold,isolated"}
            and row["timing"] == "eager,cold"
        )
        assert row["us"] == row["times"]["eager,cold"]["us"] and row["baseline"] == "rms_norm_torch"
        assert row["bound"] == "memory" and row["fraction_of_floor"] > 0 and row["error"] is not None
    assert all(row["speedup"] == pytest.approx(1.0) for row in rows if row["kernel"] == "rms_norm_torch")
    # One fused launch against five passes.
    assert all(row["speedup"] > 1.2 for row in rows if row["kernel"] == "rms_norm_cpu")
    stored = json.loads(path.read_text())["rows"][0]
    assert len(stored["samples"]) >= 5 and len(stored["times"]["eager,hot"]["samples"]) == len(
        stored["samples"]
    )


def test_quick_times_what_is_deployed_alone() -> None:
    rows = answer("bench", "rms_norm", "--problem", "m=4,n=256", "--seconds", "0.05", "--quick")
    timed = [row for row in rows if row["us"]]
    assert timed and all(row["times"].keys() == {"eager,cold"} for row in timed)


def test_a_kernel_that_cheats_has_a_reason_and_no_time() -> None:
    cheat = cheats.kernel(cheats.results_cached_by_pointer)
    honest = default_registry().kernel("rms_norm", "rms_norm_cpu")
    rows = kernel_rows(
        OP, OP.problem("m=64,n=2048"), [cheat, honest], place("cpu"), baseline=cheat, seconds=0.05
    )
    assert rows[0]["us"] is None and "over the tolerance" in rows[0]["reason"] and rows[0]["times"] == {}
    assert rows[1]["us"] > 0 and rows[1]["speedup"] is None  # no baseline is left


def test_a_kernel_caught_late_loses_its_time_too() -> None:
    cheat = cheats.kernel(cheats.writes_skipped_after_a_while)
    row = kernel_rows(OP, OP.problem("m=64,n=2048"), [cheat], place("cpu"), seconds=0.05)[0]
    assert row["us"] is None and "error inf" in row["reason"] and row["wrong"]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_kernel_is_status_1(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    monkeypatch.setattr(compare, "verified", lambda *which: "error 3 is over the tolerance" if wrong else "")
    monkeypatch.setattr(timings, "verified", compare.verified)
    result = CliRunner().invoke(
        cli,
        [
            "bench",
            "rms_norm",
            "--problem",
            "m=4,n=64",
            "--kernels",
            "*_cpu",
            "--quick",
            "--seconds",
            "0.01",
            "--target",
            "cpu",
            "--json",
        ],
    )
    row = json.loads(result.stdout)[0]
    assert result.exit_code == wrong and row["wrong"] == wrong and (row["us"] is None) == wrong


HUGE = "m=25000000000,n=64"


def test_a_problem_larger_than_the_memory_is_a_gap_everywhere(tmp_path: Path) -> None:
    rows = answer("bench", "rms_norm", "--problem", HUGE, "--kernels", "*_cpu", "--quick")
    assert rows[0]["us"] is None and "GiB are free" in rows[0]["reason"] and not rows[0]["wrong"]
    rows = answer("compare", "rms_norm", "--problem", HUGE, "--kernels", "*_torch", "--baseline", "*_cpu")
    assert rows[0]["verdict"] == "GAP" and "GiB are free" in rows[0]["reason"]
    result = CliRunner().invoke(
        cli,
        [
            "tune",
            "rms_norm",
            "--problem",
            HUGE,
            "--minutes",
            "0.1",
            "--workers",
            "1",
            "--target",
            "cpu",
            "--json",
        ],
    )
    row = json.loads(result.stdout)["problems"][0]
    assert row["state"] == "nothing ran" and "GiB are free" in row["reason"] and row["wrong"] == []
    path = tmp_path / "r.json"
    path.write_text(
        json.dumps(
            {"schema": 1, "rows": [{"op": "rms_norm", "problem": HUGE, "kernel": "rms_norm_cpu", "us": 1.0}]}
        )
    )
    result = CliRunner().invoke(cli, ["rerun", str(path), "--target", "cpu", "--json"])
    row = json.loads(result.stdout)["rows"][0]
    assert result.exit_code == 0 and row["verdict"] == "GAP" and "GiB are free" in row["reason"]


def test_what_cannot_be_judged_is_no_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    unjudged = {
        "ok": False,
        "error": None,
        "tolerance": None,
        "reason": "no memory for the reference",
        "judged": False,
    }
    monkeypatch.setattr(worker.Worker, "verify", lambda *task: unjudged)
    row = answer("bench", "rms_norm", "--problem", "m=4,n=64", "--kernels", "*_cpu", "--quick")[0]
    assert row["us"] is None and not row["wrong"] and "no memory for the reference" in row["reason"]
    rows = answer(
        "compare", "rms_norm", "--problem", "m=4,n=64", "--kernels", "*_torch", "--baseline", "*_cpu"
    )
    assert {row["verdict"] for row in rows} == {"GAP"} and any(
        "no memory for the reference" in row["reason"] for row in rows
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "rms_norm", "--kernels", ","),
        ("bench", "rms_norm", "--kernels", ""),
        ("list", "--op", ""),
        ("bench", ""),
        ("compare", "--suite", "norms", "--kernels", ""),
        ("tune", "rms_norm", "--minutes", "nan"),
        ("bench", "rms_norm", "--seconds", "inf"),
        ("compare", "rms_norm", "--min-effect", "nan"),
    ],
)
def test_options_that_say_nothing_are_mistakes(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*arguments, "--target", "cpu"])
    assert isinstance(result.exception, UnknownError) or result.exit_code == 2, result.output


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    op, here = default_registry().op("linear"), place("h200")
    gaps = {kernel.name for kernel in missing_peers(op, here)}
    assert "linear_humming" in gaps and all(
        default_registry().kernel("linear", name).provider != "gristmill" for name in gaps
    )
    assert gaps <= {kernel.name for kernel in chosen([op], None, here)["linear"]}
    rows = answer(
        "bench",
        "linear",
        "--problem",
        "m=1,n=64,k=128,w=int4_g128",
        "--kernels",
        "linear_humming,linear_cpu",
        "--seconds",
        "0.05",
    )
    assert rows[0]["us"] is None and rows[0]["reason"] and rows[1]["us"] > 0


BENCH = (
    "bench",
    "rms_norm",
    "--problem",
    "m=64,n=4096",
    "--kernels",
    "rms_norm_cpu",
    "--seconds",
    "0.05",
    "--quick",
)
COMPARE = (
    "compare",
    "rms_norm",
    "--problem",
    "m=64,n=4096",
    "--kernels",
    "rms_norm_cpu",
    "--baseline",
    "*_torch",
    "--seconds",
    "0.1",
)


def test_floors_are_read_in_the_way_that_rows_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.autotune.floor import Ceilings

    monkeypatch.setattr("gristmill.autotune.floor.ceilings", lambda device: Ceilings(1e3, 1e3, (), 0.0))
    size = OP.cost(OP.problem("m=64,n=4096")).bytes
    for command, copies in ((BENCH, 16), (COMPARE, 16), ((*COMPARE, "--hot"), 1)):
        (row,) = answer(*command)
        assert (
            row["floor_source"].startswith(f"read kernel of {size} bytes, {copies} in turn (")
            and row["bound"] == "memory"
        )
        assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / row["us"]) and row["floor_us"] > 0


@pytest.mark.parametrize("command", [BENCH, COMPARE])
def test_a_time_below_its_floor_is_flagged(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 105 % of the floor is an error of the floor, and is not printed as an achievement."""
    from gristmill.autotune.floor import Ceilings
    from gristmill.autotune.reading import Reading

    limits = Ceilings(0.01, 0.01, (), 0.0)
    monkeypatch.setattr("gristmill.autotune.floor.ceilings", lambda device: limits)
    # Microseconds: a read slower than every kernel, one faster than every kernel, and one that does not fit,
    # at 0.01 GB/s.
    for us, flag in ((1e6, "disturbed twice"), (1e-3, ""), (None, "doctor --measure")):
        monkeypatch.setattr(
            "gristmill.autotune.floor.reading",
            lambda *_, us=us, **more: Reading(1, more["copies"], us, "planted"),
        )
        (row,) = answer(*command)
        assert (row["fraction_of_floor"] > 1) == bool(flag) and row["us"] > 0
        assert flag in row["note"] and bool(row["note"]) == bool(flag)
        assert row["floor_source"].startswith("read bandwidth" if us is None else "read kernel")
        shown = CliRunner().invoke(cli, [*command, "--target", "cpu"]).stdout
        assert ("disturbed" in shown) == bool(flag)


def test_a_size_that_several_kernels_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.autotune import reading

    reading.forget()
    measured, true = [], reading._measured
    monkeypatch.setattr(reading, "_measured", lambda *what: measured.append(what) or true(*what))
    problems = ("--problem", "m=64,n=4096", "--seconds", "0.05", "--quick")
    rows = answer("bench", "rms_norm", *problems) + answer("bench", "rms_norm", *problems)
    below = sum(bool(row["note"]) for row in rows)
    assert sum(row["us"] is not None for row in rows) >= 4 and len(measured) <= 1 + bool(below)


def test_problems_may_be_written_together() -> None:
    assert expand("m=1|16,n=4,w=a|b") == ["m=1,n=4,w=a", "m=1,n=4,w=b", "m=16,n=4,w=a", "m=16,n=4,w=b"]


def test_every_shipped_suite_loads_and_has_no_problem_twice() -> None:
    for name in suite_names():
        suite = load_suite(name)
        assert suite.what and suite.problems and len(set(suite.problems)) == len(suite.problems), name
        assert not any(problem.open_axes for _, problem in suite.problems), name


def test_a_suite_of_ones_own_and_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"what": "x", "problems": {"rms_norm": ["m=1|2,n=64"]}}')
    rows = answer("bench", "--suite", str(path), "--kernels", "*_cpu", "--seconds", "0.05")
    assert [row["problem"] for row in rows] == ["m=1,n=64", "m=2,n=64"]
    for text, complaint in (
        ("{", "line 1"),
        ("[]", "expected {"),
        ('{"problems": {"rms_norm": "m=1"}}', "expected {"),
    ):
        path.write_text(text)
        with pytest.raises(SuiteError, match=complaint):
            load_suite(str(path))
    with pytest.raises(SuiteError, match="one of attention_decode"):
        load_suite("no_such_suite")


def test_a_models_calls_are_asked_once_each_with_their_weight() -> None:
    loaded = Asked(None, (), None).workloads(
        calls(load_config("llama-3-8b"), 2, MIXES["decode"], "int4_g128")
    )
    assert len({(one.op.name, str(one.problem)) for one in loaded}) == len(loaded)
    assert {"linear", "paged_attention", "sample", "rms_norm"} <= {one.op.name for one in loaded} and all(
        one.weight for one in loaded
    )
    only = Asked("linear", (), None).workloads(
        calls(load_config("llama-3-8b"), 2, MIXES["decode"], "int4_g128")
    )
    assert only and {one.op.name for one in only} == {"linear"}


def test_bench_and_compare_take_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    arguments = ("--model", str(path), "--tp", "2", "--decode", "2x16", "--kernels", "*_cpu")
    rows = answer("bench", *arguments, "--seconds", "0.02", "--quick")
    refused = {row["kernel"] for row in rows if row["us"] is None}
    assert refused == {"linear_a8_cpu", "linear_a8_groups_cpu"}, "these alone need quantized activations"
    timed = [row for row in rows if row["kernel"] not in refused]
    assert (
        all(row["us"] > 0 and row["weight"] >= 1 for row in timed) and len({row["op"] for row in timed}) > 5
    )
    verdicts = answer("compare", "rms_norm", *arguments, "--baseline", "*_torch", "--seconds", "0.5")
    assert [(row["kernel"], row["baseline"]) for row in verdicts] == [("rms_norm_cpu", "rms_norm_torch")]


def test_mistakes_are_named() -> None:
    here, linear = place("cpu"), default_registry().op("linear")
    with pytest.raises(click.UsageError, match="give one of them"):
        Asked("rms_norm", ("m=1,n=4",), "examples").workloads(())
    with pytest.raises(click.UsageError, match="name an operation, a suite"):
        Asked(None, (), None).workloads(())
    with pytest.raises(click.UsageError, match="no problem of sample in norms"):
        Asked("sample", (), "norms").workloads(())
    with pytest.raises(UnknownError, match="no kernel of rms_norm, linear matches 'rms_nrom'"):
        chosen([OP, linear], "rms_nrom", here)
    dense, packed = linear.problem("m=1,n=64,k=128"), linear.problem("m=1,n=64,k=128,w=int4_g128")
    assert baseline_of(linear, dense, "*_torch", here).name == "linear_torch"
    assert baseline_of(linear, packed, "*_torch", here).name == "linear_dequant_torch"


def test_names_of_timings() -> None:
    assert [timing_name(captured, hot) for captured in (True, False) for hot in (False, True)] == [
        "graph,cold",
        "graph,hot",
        "eager,cold",
        "eager,hot",
    ]
