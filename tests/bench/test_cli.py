"""The kernelbench command line as users see it: exact JSON, one-line errors with status 2, help with lists of
names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.bench.cli import cli, main
from gristmill.kernel_registry.plan import BUCKETS
from gristmill.kernel_registry.policy import Policy

VERDICTS = {"selected", "eligible", "unverified", "hardware", "build", "problem", "policy", "quarantined"}
SOURCES = {"measured", "near", "sibling", "model", "priority", None}


def kernelbench(*arguments: str, cache: Path, policy: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "GRISTMILL_POLICY")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if policy is not None:
        environment["GRISTMILL_POLICY"] = str(policy)
    return subprocess.run(
        [sys.executable, "-m", "gristmill.bench.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.fixture(autouse=True)
def own_store(policy_file) -> None:
    policy_file()


def answer(*arguments: str, status: int = 0) -> Any:
    """Returns what a command prints with --json, run in this process."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_list_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    process = kernelbench("list", "--json", cache=tmp_path)
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)
    assert {tuple(row) for row in rows} == {
        ("op", "kernel", "provider", "language", "available", "reasons", "proof")
    }
    assert all(row["available"] == (not row["reasons"]) for row in rows)
    only = answer("list", "--op", "rms_norm", "--target", "gfx942")
    assert {row["op"] for row in only} == {"rms_norm"}
    assert next(row for row in only if row["kernel"] == "rms_norm_triton")["available"]
    assert "runs on cpu" in next(row for row in only if row["kernel"] == "rms_norm_cpu")["reasons"][0]


def test_list_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['kernelbench', 'list', '--json']\nfrom gristmill.bench import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\nassert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.returncode == 0, process.stderr


def test_explain_here_selects_and_verifies() -> None:
    output = answer("explain", "rms_norm", "--problem", "m=4,n=64,x=fp32", "--target", "cpu")
    assert list(output) == ["op", "problem", "target", "selected", "slow", "candidates"]
    assert not output["slow"]
    assert {tuple(row) for row in output["candidates"]} == {
        ("kernel", "verdict", "reasons", "expected_us", "source")
    }
    assert {row["verdict"] for row in output["candidates"]} <= VERDICTS
    assert {row["source"] for row in output["candidates"]} <= SOURCES
    chosen = [row["kernel"] for row in output["candidates"] if row["verdict"] == "selected"]
    assert chosen == [output["selected"]]


def test_explain_elsewhere_verifies_nothing() -> None:
    output = answer("explain", "rms_norm", "--problem", "m=4,n=64", "--target", "sm_121")
    assert output["target"] == "sm_121" and output["selected"] == "rms_norm_triton"
    assert {row["verdict"] for row in output["candidates"]} <= {
        "unverified",
        "hardware",
        "build",
        "problem",
        "policy",
    }
    assert not Policy.current().store_path.exists()


def test_explain_without_the_dynamic_size_prints_a_plan() -> None:
    output = answer("explain", "rms_norm", "--problem", "n=64,x=fp32", "--target", "cpu")
    assert [row["m_max"] for row in output["plan"]] == [*BUCKETS, None]
    assert all({"m_max", "kernel", "layout", "config"} <= row.keys() for row in output["plan"])


def test_axes_are_listed() -> None:
    output = answer("explain", "rms_norm", "--axes")
    assert [row["axis"] for row in output["axes"]] == ["m", "n", "x", "w"]


def test_verify_and_bench_rows() -> None:
    rows = answer("verify", "--op", "rms_norm", "--kernel", "rms_norm_torch", "--target", "cpu")
    assert rows and all(row["ok"] and row["error"] <= row["tolerance"] for row in rows)
    assert {"op", "kernel", "problem", "ok", "error", "tolerance"} <= rows[0].keys()
    timed = answer(
        "bench",
        "rms_norm",
        "--problem",
        "m=64,n=512,x=fp32",
        "--seconds",
        "0.05",
        "--target",
        "cpu",
        "--save",
    )
    assert all({"us", "spread", "gbs", "tflops", "fraction_of_floor", "error"} <= row.keys() for row in timed)
    assert all((row["us"] is None) == bool(row["reason"]) for row in timed)
    timed = [row for row in timed if row["us"]]
    fastest = min(timed, key=lambda row: row["us"])["kernel"]
    output = answer("explain", "rms_norm", "--problem", "m=64,n=512,x=fp32", "--target", "cpu")
    assert output["selected"] == fastest and output["candidates"][0]["source"] == "measured"


def test_noise_states_the_floor_and_refuses_less() -> None:
    arguments = ("noise", "rms_norm", "--problem", "m=64,n=512", "--target", "cpu", "--comparisons", "3")
    output = answer(*arguments, "--min-effect", "0.0000001", status=3)
    assert output["comparisons"] == 3 and 0 < output["floor"] <= output["worst"]
    assert "is below this machine's noise floor of" in output["refused"]
    output = answer(*arguments, "--min-effect", "0.99", "--kernel", "rms_norm_torch")
    assert output["refused"] == "" and output["kernel"] == "rms_norm_torch" and output["false"] == 0


def test_doctor_reports() -> None:
    output = answer("doctor")
    assert output["devices"][-1]["vendor"] == "cpu" and output["registry"]["kernels"] > 0
    assert output["devices"][-1]["measured"] is None and output["devices"][-1]["state"]["threads"] >= 1
    assert "None" not in CliRunner().invoke(cli, ["doctor"]).stdout


def test_a_policy_is_obeyed_and_a_strict_one_never_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ("explain", "rms_norm", "--problem", "m=4,n=64,x=fp32", "--target", "cpu")
    for pinned, selected in (("rms_norm_torch", "rms_norm_torch"), ("no_such_kernel", None)):
        policy = tmp_path / f"{pinned}.toml"  # a policy is read once per name of a file
        policy.write_text(f'cache = "{tmp_path}"\nstrict = true\n[pins]\nrms_norm = ["{pinned}"]\n')
        monkeypatch.setenv("GRISTMILL_POLICY", str(policy))
        assert answer(*problem)["selected"] == selected


def test_names_in_a_policy_that_nothing_has_are_told(policy_file) -> None:
    text = 'exclude = ["rms_norm_cuda", "*_flashinfer"]\n[pins]\nrms_nrom = "x"\nrms_norm = ["*_cpu", "nope"]\n"*" = "*_tritn"\n'
    path = policy_file(text)
    wrong = [
        f"policy {path}: pins: no operation is called 'rms_nrom'; did you mean rms_norm?",
        f"policy {path}: pins: no kernel of rms_norm is called 'nope'",
        f"policy {path}: pins: no kernel is called '*_tritn'",
        f"policy {path}: exclude: no kernel is called 'rms_norm_cuda'; did you mean rms_norm_cpu?",
    ]
    assert answer("doctor")["unmatched"] == wrong
    with pytest.warns(RuntimeWarning) as warned:
        answer("explain", "rms_norm", "--problem", "m=4,n=64,x=fp32", "--target", "cpu")
    assert {*wrong} <= {str(warning.message) for warning in warned}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("list", "--op", "rms_nrom"), "did you mean rms_norm"),
        (("list", "--target", "sm_999"), "sm_999"),
        (("explain", "rms_norm", "--problem", "m=4,colour=red"), "no axis colour; its axes are m, n, x"),
        (
            ("explain", "rms_norm", "--problem", "m=four,n=4"),
            "axis m wants an integer of at least 0, got 'four'",
        ),
        (("explain", "rms_norm", "--problem", "m=4"), "missing n"),
        (
            (
                "explain",
                "rms_norm",
            ),
            "--problem is missing",
        ),
        (("verify", "--kernel", "nothing"), "no kernel called 'nothing'"),
        (("verify", "--target", "sm_100"), "not a device of this machine"),
        (("bench", "rms_norm", "--kernels", "rms_norm_cup"), "did you mean rms_norm_cpu"),
        (("bench", "rms_norm", "--problem", "n=4"), "leaves m open"),
        (("compare", "rms_norm", "--target", "sm_100"), "not a device of this machine"),
        (("compare", "rms_norm", "--kernels", "nothing_*"), "no kernel of rms_norm matches 'nothing_*'"),
        (("compare", "rms_norm", "--problem", "n=4"), "leaves m open"),
        (("check", "x.json", "--op", "rms_norm"), "go with --update"),
        (("noise", "rms_norm", "--kernel", "rms_norm_flashinfer"), "cannot be timed on"),
        (("noise", "rms_norm", "--problem", "n=4"), "leaves m open"),
        (("shapes", "--model", "llama-9"), "one of deepseek-v3"),
        (("shapes", "--tp", "2"), "go with --model"),
        (("coverage",), "--model is missing"),
        (("tune",), "give one of: an operation, a model"),
        (("store", "diff", "a.json", "b.json"), "a.json does not exist"),
        (("rerun", "absent.json"), "absent.json"),
        (("report", "absent.json", "--html", "p.html"), "absent.json"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    complaint: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GRISTMILL_POLICY", raising=False)
    monkeypatch.setattr(sys, "argv", ["kernelbench", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    result = capfd.readouterr()
    assert status.value.code == 2 and result.out == ""
    assert complaint in result.err and result.err.count("\n") == 1, result.err


def test_a_mistake_ends_the_program_with_status_2(tmp_path: Path) -> None:
    result = kernelbench("list", "--op", "rms_nrom", cache=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert "did you mean rms_norm" in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_wrong_policy_file_is_a_mistake_too(tmp_path: Path) -> None:
    result = kernelbench("list", cache=tmp_path, policy=tmp_path / "absent.toml")
    assert result.returncode == 2 and "absent.toml" in result.stderr and result.stderr.count("\n") == 1


def commands() -> list[tuple[str, ...]]:
    return [
        (name, sub) if sub else (name,)
        for name, command in cli.commands.items()
        for sub in getattr(command, "commands", {"": None})
    ]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_helps(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0 and "--json" in result.stdout and len(result.stdout.splitlines()) > 8
